"""An autoencoder in diffusers' folder layout as the codec, and its replacement by other weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from projects import make_project
from safetensors.torch import load_file, save_file

from tiny_autoencoders import write_autoencoder

pytestmark = pytest.mark.slow

SAMPLES = "results/micro/samples/samples.npz"
MADE_OF_LATENTS = {"encode", "train", "sample"}


@pytest.mark.parametrize("codec", ["stability_vae", pytest.param("diffusers", marks=pytest.mark.long)])
def test_replaced_codec_weights_rerun_later_stages(tmp_path: Path, codec: str) -> None:
    """Also if the new files are older, as after a copy that preserves times."""
    project = make_project(tmp_path / "project")
    for folder in ("vae", "decoder"):
        write_autoencoder("sd", project / folder)

    def change(experiment: dict[str, Any]) -> None:
        experiment["codec"] = {"type": codec, "weights": "vae"}
        experiment["system"]["network"]["patch"] = 1
        experiment["sample"]["decoder"] = "decoder"

    project.edit(change)
    project.run(SAMPLES)
    manifest = project / "results/datasets/dots-16/vae/manifest.json"
    first, images = json.loads(manifest.read_text())["codec"], (project / SAMPLES).read_bytes()
    assert project.planned(SAMPLES) == set()

    replace(project / "decoder")
    assert project.planned(SAMPLES) == {"sample"}
    project.run(SAMPLES)
    assert (project / SAMPLES).read_bytes() != images

    replace(project / "vae")
    assert project.planned(SAMPLES) == MADE_OF_LATENTS
    project.run(SAMPLES)
    assert json.loads(manifest.read_text())["codec"] != first
    assert project.planned(SAMPLES) == set()


def replace(folder: Path) -> None:
    """Halve every weight, in a file that is older than all results."""
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor / 2 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    os.utime(path, (1e9, 1e9))
