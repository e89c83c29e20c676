"""Images of a height and a width, through every stage: a network on pixels, and one on the tokens of a codec."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("rectangles") / "project")

    def change(experiment: dict[str, Any]) -> None:
        experiment["data"]["resolution"] = [16, 24]
        experiment["train"] |= {"steps": 4, "flip_probability": 0.5, "augment": {}}

    for name in ("micro_dvae", "micro_tokens"):
        text = (ROOT / "tests" / "workflow" / f"{name}.yaml").read_text()
        (made / f"config/experiments/{name}.yaml").write_text(text.replace("resolution: 16", "resolution: [16, 24]"))
    made.edit(change)
    made.edit(lambda experiment: experiment.update(export={"format": "pipeline"}))
    made.run("--config", "experiments=[micro, micro_tokens]")
    return made


def test_crops_samples_and_metrics_have_their_shape(project: Project) -> None:
    manifest = json.loads((project / "results/datasets/dots-16x24/crops/manifest.json").read_text())
    assert manifest["shape"] == [3, 16, 24] and manifest["crop"]["resolution"] == [16, 24]
    for name in ("micro", "micro_tokens"):
        samples = np.load(project / f"results/{name}/samples/samples.npz")["arr_0"]
        assert samples.shape[1:] == (16, 24, 3)
        assert json.loads((project / f"results/{name}/metrics.json").read_text())["metrics"]
    with Image.open(project / "results/micro/samples/grid.png") as grid:
        assert grid.size == (
            2 * (4 * 24 + 2),
            8 * (4 * 16 + 2),
        )  # two columns, four times as large, lines of two pixels


def test_the_model_says_its_shape_and_a_square_one_is_another_data_set(project: Project) -> None:
    model = json.loads((project / "results/micro/train/model.json").read_text())
    assert model["spec"]["resolution"] == [16, 24]
    planned = project.planned("--config", "experiments=[micro]")
    assert "crop" not in planned and "train" not in planned
    path = project / "config/experiments/micro.yaml"
    data = yaml.safe_load(path.read_text())
    data["data"]["resolution"] = [16, 16]
    path.with_name("square.yaml").write_text(yaml.safe_dump(data))
    assert {"crop", "train"} <= project.planned("--config", "experiments=[square]")


def test_a_killed_training_goes_on_to_the_same_bytes(project: Project) -> None:
    before, after = project.weights_after_resuming()
    assert after == before
