"""A ledger becomes experiments that are named by what they change; a mistake in it is one line with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_diffusion.configure import load_all
from image_diffusion.experiment import load_experiment
from image_diffusion.ledgers import Expanded, expand, operations_of, schema

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "config" / "experiments"
ROWS = [
    {"name": "qk-norm", "changes": {"system.network.qk_norm": True}, "source": "somewhere"},
    {"name": "swiglu", "changes": {"system": {"network": {"mlp": "swiglu"}}}},
]
GOOD: dict[str, Any] = {"base": "demo_flow", "seeds": [0, 1], "budget": {"steps": 9}, "rows": ROWS}


def expanded(folder: Path, name: str = "mine", **changes: Any) -> Expanded:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return expand(path, EXPERIMENTS)


def test_each_row_and_seed_is_an_experiment_with_its_change_and_nothing_else(tmp_path: Path) -> None:
    runs = {(run.row, run.seed): run.experiment for run in expanded(tmp_path).runs}
    assert list(runs) == [(row, seed) for row in ("base", "qk-norm", "swiglu") for seed in (0, 1)]
    base = load_experiment(EXPERIMENTS / "demo_flow.yaml")
    for (row, seed), experiment in runs.items():
        assert experiment.train == base.train.model_copy(update={"steps": 9, "seed": seed})
        assert experiment.sample == base.sample.model_copy(update={"seed": seed})
        assert (experiment.data, experiment.codec, experiment.evaluate) == (base.data, base.codec, base.evaluate)
        network: Any = experiment.system.network  # type: ignore[attr-defined]
        assert (network.qk_norm, network.mlp) == (row == "qk-norm", "swiglu" if row == "swiglu" else "gelu")


def test_runs_are_shared_by_rows_and_ledgers_that_change_the_same(tmp_path: Path) -> None:
    one = expanded(tmp_path, "one")
    dotted = [{"name": "another name", "changes": {"system.network.mlp": "swiglu"}}]
    other = expanded(tmp_path, "other", rows=dotted, seeds=[1, 2])
    names = [{(run.row, run.seed): run.name for run in each.runs} for each in (one, other)]
    assert names[0]["base", 1] == names[1]["base", 1]
    assert names[0]["swiglu", 1] == names[1]["another name", 1]
    assert len({*names[0].values(), *names[1].values()}) == 6 + 4 - 2
    assert len(load_all([], [one, other])) == 8 + 1, "and the experiment of the codec"


def test_a_budget_of_operations_gives_costly_rows_fewer_steps(tmp_path: Path) -> None:
    wide = [{"name": "wide", "changes": {"system.network.width": 256}}]
    runs = expanded(tmp_path, rows=wide, seeds=[0], budget={"operations": 1e11}).runs
    codec = load_experiment(EXPERIMENTS / "demo_codec.yaml")
    for run in runs:
        train = run.experiment.train
        step = operations_of(run.experiment, codec) * train.global_batch
        assert train.steps == 1e11 // step
    assert runs[0].experiment.train.steps > 3 * runs[1].experiment.train.steps


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"base": "demo_flwo"}, "base is demo_flwo, but "),
        ({"base": "demo_flwo"}, " does not exist. Did you mean demo_flow?"),
        ({"sedes": [1]}, "sedes is not a known key. Did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds are [1, 1], one of them twice."),
        ({"rows": [ROWS[0], ROWS[0]]}, "Two rows are called qk-norm. Give each a name of its own."),
        ({"rows": [ROWS[0], ROWS[0] | {"name": "b"}]}, "The rows qk-norm and b change the same."),
        ({"rows": [ROWS[0] | {"name": "base"}]}, "Two rows are called base."),
        ({"budget": {"steps": 3, "operations": 5}}, "steps and operations are both set"),
        ({"budget": {"operations": 5}}, "row base: a step takes "),
        (
            {"rows": [{"name": "a", "changes": {"system.network.qk_nrm": True}}]},
            "row a: system.network.qk_nrm is not a known key. Did you mean system.network.qk_norm?",
        ),
        ({"rows": [{"name": "a", "changes": {"train.": 1}}]}, "'train.' names no key."),
        ({"rows": [{"name": "a", "changes": {"train.steps": 4}}]}, "row a is the same as row base, with the budget"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        expanded(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path}/mine.yaml: ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_data_under_the_same_name_is_a_mistake_of_its_row(tmp_path: Path) -> None:
    ledger = expanded(tmp_path, rows=[{"name": "other crops", "changes": {"data.num_shards": 5}}])
    with pytest.raises(ValueError, match="mine.yaml: row other crops: "):
        load_all([], [ledger])


@pytest.mark.parametrize("path", sorted((ROOT / "config/ledgers").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ledger_that_is_shipped_can_be_made(path: Path) -> None:
    ledger = expand(path, EXPERIMENTS)
    load_all([], [ledger])
    assert ledger.plan()["rows"][0]["name"] == "base"


def test_the_schema_is_that_of_the_code() -> None:
    written = json.loads((ROOT / "workflow/schemas/ledger.schema.json").read_text())
    told = "run: python -m image_diffusion.configure --schema workflow/schemas/experiment.schema.json"
    assert written == schema(), told
