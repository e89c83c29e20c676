"""Rectangular images through every stage of every system that draws images."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow


SHAPE = [48, 96]
NETWORKS = {
    "iddpm": {
        "channels": 32,
        "multipliers": [1, 1, 2],
        "num_res_blocks": 1,
        "attention_resolutions": [12],
        "num_heads": 2,
    },
    "rin": {"width": 32, "patch": 8, "depth": 1, "num_latents": 8, "latent_width": 32},
}
ON_PIXELS = ["micro", *NETWORKS]
ALL = [*ON_PIXELS, "micro_latent", "micro_tokens"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("rectangles") / "project")

    def written(name: str, of: str, **sections: Any) -> None:
        experiment = yaml.safe_load((ROOT / "tests" / "workflow" / f"{of}.yaml").read_text())
        experiment["data"]["resolution"] = SHAPE
        experiment["train"] |= {"steps": 4, "checkpoint": {"every_steps": 2}}
        (made / f"config/experiments/{name}.yaml").write_text(yaml.safe_dump(experiment | sections))

    written("micro", "micro", export={"format": "pipeline"})
    made.edit(lambda experiment: experiment["train"].update(flip_probability=0.5, augment={}))
    for name, network in NETWORKS.items():
        written(name, "micro", system={"type": name, "network": network}, export={"format": "pipeline"})
    written("micro_dvae", "micro_dvae")
    written("micro_latent", "micro_latent", export={"format": "pipeline"})
    written("micro_tokens", "micro_tokens")
    made.run("--config", f"experiments=[{','.join(ALL)}]")
    return made


def test_crops_samples_and_metrics_have_their_shape(project: Project) -> None:
    manifest = json.loads((project / "results/datasets/dots-48x96/crops/manifest.json").read_text())
    assert manifest["shape"] == [3, *SHAPE] and manifest["crop"]["resolution"] == SHAPE
    for name in ALL:
        samples = np.load(project / f"results/{name}/samples/samples.npz")["arr_0"]
        assert samples.shape[1:] == (*SHAPE, 3)
        assert json.loads((project / f"results/{name}/metrics.json").read_text())["metrics"]
    with Image.open(project / "results/micro/samples/grid.png") as grid:
        assert grid.size == (4 * (2 * 96 + 2), 4 * (2 * 48 + 2))  # 16 samples, twice as large


@pytest.mark.parametrize("name", [*ON_PIXELS, "micro_latent"])
def test_exported_model_draws_rectangles(project: Project, name: str) -> None:
    from diffusers import DiffusionPipeline  # here: collecting tests does not import it

    folder = str(project / f"results/{name}/diffusers")
    pipeline = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    described = json.loads((project / f"results/{name}/samples/samples.json").read_text())["settings"]
    images = pipeline(seeds=[0, 1], class_labels=[0, 1], sampler=described["sampler"]).images
    assert [image.size for image in images] == [(96, 48)] * 2


def test_model_records_its_shape_and_square_images_are_another_data_set(project: Project) -> None:
    model = json.loads((project / "results/micro/train/model.json").read_text())
    assert model["spec"]["resolution"] == SHAPE
    planned = project.planned("--config", "experiments=[micro]")
    assert "crop" not in planned and "train" not in planned
    path = project / "config/experiments/micro.yaml"
    data = yaml.safe_load(path.read_text())
    data["data"]["resolution"] = [48, 48]
    path.with_name("square.yaml").write_text(yaml.safe_dump(data))
    assert {"crop", "train"} <= project.planned("--config", "experiments=[square]")


@pytest.mark.long
def test_stopped_trainings_resume_bit_exactly(project: Project) -> None:
    before, after = project.weights_after_resuming(*ALL)
    assert after == before
