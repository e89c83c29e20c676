"""Commands from a published file to images and bits per dimension, with random weights of the published shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import image_diffusion.experiments.resolve
import image_diffusion.stages.crop
import image_diffusion.stages.evaluate
import image_diffusion.stages.export
import image_diffusion.stages.sample
import image_diffusion.tools.configure
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import UNetConfig

DATA = {"name": "digits", "source": {"type": "digits"}, "resolution": 32, "validation_fraction": 0.01, "num_shards": 1}


def command(main: Any, *arguments: str | Path) -> None:
    """Run a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["verb", *map(str, arguments)])
        main()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with crops of digits and with weights imported from a file with the published name."""
    folder = tmp_path_factory.mktemp("published")
    config = folder / "crop.yaml"
    config.write_text(yaml.safe_dump(DATA))
    command(
        image_diffusion.stages.crop.main,
        "--config",
        config,
        "--output",
        folder / "crops/manifest.json",
        "--processes",
        "1",
    )
    torch.manual_seed(0)
    network = UNetConfig(channels=128, num_res_blocks=3).build(
        DataSpec(channels=3, resolution=32), learned_variance=True
    )
    nn.init.normal_(network.out[2].weight, std=0.01)
    torch.save(network.state_dict(), folder / "cifar10_uncond_50M_500K.pt")
    command(
        image_diffusion.stages.export.main,
        "--read",
        folder / "cifar10_uncond_50M_500K.pt",
        "--output",
        folder / "train",
    )
    return folder


def test_published_file_generates_images(published: Path, tmp_path: Path) -> None:
    config = tmp_path / "sample.yaml"
    sampler = {"type": "ddpm", "num_steps": 2, "clip_denoised": True}
    config.write_text(yaml.safe_dump({"sample": {"num_samples": 2, "sampler": sampler}}))
    output = tmp_path / "samples.npz"
    weights = published / "train/weights.safetensors"
    command(image_diffusion.stages.sample.main, "--config", config, "--weights", weights, "--output", output)
    with np.load(output) as arrays:
        assert arrays["arr_0"].shape == (2, 32, 32, 3) and "arr_1" not in arrays


def test_published_file_gives_bits_per_dimension(published: Path, tmp_path: Path) -> None:
    config, output = tmp_path / "evaluate.yaml", tmp_path / "metrics.json"
    config.write_text(yaml.safe_dump({"evaluate": {"likelihood": {"num_samples": 3, "timesteps": 3}}}))
    command(
        image_diffusion.stages.evaluate.main,
        "--config", config, "--weights", published / "train/weights.safetensors", "--data", published / "crops",
        "--report", tmp_path / "evaluation", "--output", output,
    )  # fmt: skip
    result = json.loads(output.read_text())
    bits = {name: entry["value"] for name, entry in result["metrics"].items()}
    assert set(bits) == {"bits_per_dim", "bits_prior", "bits_steps", "bits_pixels"}
    assert bits["bits_per_dim"] == pytest.approx(bits["bits_prior"] + bits["bits_steps"] + bits["bits_pixels"])
    assert result["metrics"]["bits_per_dim"]["n"] == 3
    assert result["likelihood"]["timestep"] == [3999, 2000, 0] and len(result["likelihood"]["vb"]) == 3
    assert result["protocol"]["weights"]["system"] == "iddpm"
    assert (tmp_path / "evaluation/likelihood.png").is_file()


def test_data_of_another_resolution_are_rejected(published: Path, tmp_path: Path) -> None:
    crop, config = tmp_path / "crop.yaml", tmp_path / "evaluate.yaml"
    crop.write_text(yaml.safe_dump({**DATA, "resolution": 16}))
    config.write_text(yaml.safe_dump({"evaluate": {"likelihood": {}}}))
    command(
        image_diffusion.stages.crop.main,
        "--config",
        crop,
        "--output",
        tmp_path / "crops/manifest.json",
        "--processes",
        "1",
    )
    weights, output = published / "train/weights.safetensors", tmp_path / "metrics.json"
    with pytest.raises(ValueError, match=r"trained on images of \[3, 32, 32\], but --data holds \[3, 16, 16\]\."):
        command(
            image_diffusion.stages.evaluate.main,
            "--config", config, "--weights", weights, "--data", tmp_path / "crops", "--output", output,
        )  # fmt: skip
    with pytest.raises(ValueError, match="needs the network"):
        command(
            image_diffusion.stages.evaluate.main,
            "--config", config, "--data", tmp_path / "crops", "--output", output,
        )  # fmt: skip
