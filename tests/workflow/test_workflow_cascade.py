"""A cascade in one workflow: small images of one experiment, enlarged by another; and an edit of the first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow

UPSAMPLED = "results/upsampler/samples/samples.npz"
ENLARGES = [{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}]
NETWORK = {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []}


def described(resolution: int, condition: list[dict[str, Any]], **sample: Any) -> dict[str, Any]:
    """The micro experiment with a U-Net, at another resolution."""
    sections: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "workflow" / "micro.yaml").read_text())
    sections["data"]["resolution"] = resolution
    sections["system"] = {
        "type": "iddpm",
        "network": NETWORK,
        "condition": condition,
        "process": {"type": "discrete", "num_timesteps": 20},
    }
    sections["train"]["steps"] = 2
    sections["sample"].update(num_samples=8, **sample)
    return sections


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project in which `upsampler` has enlarged the images of `base`. Tests restore what they change."""
    project = make_project(tmp_path_factory.mktemp("cascade") / "project")
    sections = {
        "base": described(8, [{"type": "label"}]),
        "upsampler": described(16, ENLARGES, small_images={"experiment": "base"}),
    }
    for name, each in sections.items():
        (project / f"config/experiments/{name}.yaml").write_text(yaml.safe_dump(each))
    config = project / "config/config.yaml"
    config.write_text(config.read_text().replace("experiments: [micro]", "experiments: [upsampler]"))
    project.run(UPSAMPLED)
    return project


def test_one_command_makes_the_small_images_and_enlarges_them(cascade: Project) -> None:
    with np.load(cascade / "results/base/samples/samples.npz") as base, np.load(cascade / UPSAMPLED) as enlarged:
        assert base["arr_0"].shape == (8, 8, 8, 3) and enlarged["arr_0"].shape == (8, 16, 16, 3)
        assert base["arr_1"].tolist() == enlarged["arr_1"].tolist()
    protocol = json.loads((cascade / "results/upsampler/samples/samples.json").read_text())
    assert protocol["image"]["condition"]["shrink"] == 2
    assert cascade.planned(UPSAMPLED) == set()
    assert "results/base/metrics.json" in cascade.snakemake("--dry-run").stdout


def test_editing_the_base_enlarges_its_new_images(cascade: Project) -> None:
    path: Path = cascade / "config/experiments/base.yaml"
    before = path.read_text()
    try:
        cascade.edit(lambda experiment: experiment["sample"].update(first_seed=5), "base")
        out = cascade.snakemake("--dry-run", UPSAMPLED).stdout
        assert re.findall(r"^rule (\w+):", out, re.MULTILINE) == ["sample", "sample"]
    finally:
        path.write_text(before)
        assert cascade.planned(UPSAMPLED) == set()


def test_held_out_images_can_be_enlarged(cascade: Project) -> None:
    path: Path = cascade / "config/experiments/upsampler.yaml"
    before = path.read_text()
    try:
        cascade.edit(lambda experiment: experiment["sample"].update(small_images="validation"), "upsampler")
        cascade.run("results/upsampler/metrics.json")
        metrics = json.loads((cascade / "results/upsampler/metrics.json").read_text())["metrics"]
        assert {"psnr", "psnr_bicubic", "psnr_gain"} <= set(metrics)
        assert (cascade / "results/upsampler/evaluation/enlarged.png").is_file()
    finally:
        path.write_text(before)
