"""An experiment with a base is the base file with its own changes merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from image_diffusion.core.config.base import dump, read_inherited
from image_diffusion.experiments.experiment import load_experiment, schema

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, data in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return folder / f"{next(iter(files))}.yaml"


def test_experiment_is_merged_over_its_chain_of_bases(tmp_path: Path) -> None:
    mine = write(
        tmp_path,
        mine={"base": "middle", "train": {"steps": 5}, "sample": {"sampler": {"num_steps": 9}}, "sweep": None},
        middle={"base": "first", "train": {"lr": 2}, "sample": {"sampler": {"type": "heun"}, "num_samples": 3}},
        first={"train": {"steps": 1, "lr": 1}, "sample": {"sampler": {"type": "ddim", "eta": 1}}, "sweep": {"a": 1}},
    )
    data, files = read_inherited(mine)
    assert data == {
        "train": {"steps": 5, "lr": 2},
        "sample": {"sampler": {"type": "heun", "num_steps": 9}, "num_samples": 3},
    }
    assert [path.stem for path in files] == ["mine", "middle", "first"]


def test_experiment_with_a_base_equals_its_written_out_form(tmp_path: Path) -> None:
    demo = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text())
    whole = write(tmp_path, whole=demo | {"train": demo["train"] | {"steps": 7}})
    mine = write(tmp_path, mine={"base": "demo", "train": {"steps": 7}}, demo=demo)
    assert dump(load_experiment(mine)) == dump(load_experiment(whole))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"mine": {"base": "dem"}, "demo": {}},
            "mine.yaml: base is dem, but {0}/dem.yaml does not exist. Did",
        ),
        (
            {"mine": {"base": ["demo"]}},
            "mine.yaml: base is ['demo']. Expected the name of a file beside it",
        ),
        (
            {"mine": {"base": "mine"}},
            "mine.yaml: base leads in a circle: mine -> mine. Remove it",
        ),
        (
            {"mine": {"base": "b"}, "b": {"base": "c"}, "c": {"base": "b"}},
            "c.yaml: base leads in a circle: mine -> b -> c -> b.",
        ),
        (
            {"mine": {"base": "b"}, "b": {"system": {"type": "dit"}, "data": {}, "train": {"stpes": 1}}},
            "mine.yaml over {0}/b.yaml: train.stpes is not a known key. Did you mean train.steps?",
        ),
    ],
)
def test_invalid_base_is_one_clear_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_experiment(write(tmp_path, **files))
    assert any(message.format(tmp_path) in line for line in str(caught.value).splitlines()), caught.value


def test_editor_schema_accepts_incomplete_files_only_with_a_base() -> None:
    jsonschema.validate({"base": "demo", "train": {"steps": 5}}, schema())
    for wrong in ({"base": 3}, {"train": {"steps": 5}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())
