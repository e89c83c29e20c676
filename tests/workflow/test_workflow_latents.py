"""The whole workflow from latents that other tools have encoded, without any training image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from projects import Project, make_project

from latents import write_edm2, write_fastdit, write_lightningdit
from tiny_autoencoders import write_autoencoder

pytestmark = pytest.mark.slow

COUNT = 40
LABELS = [number % 2 for number in range(COUNT)]
RULES = {"encode", "train", "sample", "evaluate", "track", "report", "summary"}


def write_project(folder: Path, kind: str) -> Project:
    """Write a project whose experiment `micro` trains on latents of one tool and is evaluated against a file."""
    from torchvision import models

    project = make_project(folder, images=0)
    write_autoencoder("kl4", project / "vae")
    torch.save(models.resnet18(weights=None).state_dict(), project / "resnet18.pth")
    np.savez(project / "real.npz", mu=np.zeros(512), sigma=np.eye(512))
    drawn = np.random.default_rng(0).normal(size=(2, COUNT, 4, 8, 8)).astype(np.float32)
    if kind == "edm2":
        write_edm2(project / "given", np.concatenate([drawn[0], abs(drawn[1])], axis=1), LABELS)
    elif kind == "lightningdit":
        write_lightningdit(project / "given", drawn[0], drawn[1], LABELS)
    else:
        write_fastdit(project / "given", drawn[0], LABELS)

    def change(experiment: dict[str, Any]) -> None:
        experiment["data"] |= {"name": "given", "source": {"type": f"{kind}_latents", "path": "given"}}
        experiment["codec"] = {"type": "diffusers", "weights": "vae"} | ({"pixels": "unit"} if kind == "edm2" else {})
        experiment["system"]["network"]["patch"] = 2
        experiment["train"]["flip_probability"] = 0.5 if kind == "lightningdit" else 0
        detector = {"type": "torchvision", "model": "resnet18", "weights": "resnet18.pth", "resolution": 32}
        experiment["evaluate"] = {"against": "real.npz", "detectors": [detector], "copies": False}
        experiment["export"] = {"format": "pipeline"}

    project.edit(change)
    return project


@pytest.mark.parametrize(
    "kind",
    ["edm2", pytest.param("lightningdit", marks=pytest.mark.long), pytest.param("fastdit", marks=pytest.mark.long)],
)
def test_external_latents_are_trained_sampled_and_evaluated(kind: str, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", kind)
    planned = project.planned()
    assert planned >= RULES and not planned & {"crop", "datasheet", "detect", "reference"}
    project.run()
    assert np.load(project / "results/micro/samples/samples.npz")["arr_0"].shape == (16, 16, 16, 3)
    metrics = json.loads((project / "results/micro/metrics.json").read_text())
    assert metrics["metrics"]["fd_resnet18"]["value"] is not None
    assert (project / "results/micro/tracked.json").is_file() and (project / "results/micro/diffusers").is_dir()
    assert not (project / "results/datasets/given-16/crops").exists()
    assert project.planned() == set()
    if kind == "edm2":
        one = project / "given/00000/img-mean-std-00000003.npy"
        np.save(one, np.load(one) + 1)
        assert project.planned() == RULES | {"export"}
        shutil.rmtree(project / "given")
        told = project.snakemake("--dry-run").stdout
        assert "data.source.path: given does not exist" in told


def test_latents_without_reference_file_are_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", "fastdit")
    path = project / "config/experiments/micro.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "evaluate"}))
    told = project.snakemake("--dry-run")
    assert told.returncode != 0
    assert "data.source.type is fastdit_latents: there are no real images that evaluate could look at." in told.stdout
