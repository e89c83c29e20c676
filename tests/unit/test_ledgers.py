"""A ledger becomes experiments that are named by what they change; a mistake in it is one line with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_diffusion.configure import load_all
from image_diffusion.core.config import dump
from image_diffusion.experiment import load_experiment
from image_diffusion.ledgers import Expanded, expand, operations_of, schema, seeds_of

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


def seeds_in(path: Path) -> Expanded | None:
    return seeds_of(path, load_experiment(path))


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


def seeded(folder: Path, seeds: Any, name: str = "mine", **train: Any) -> Path:
    path = folder / f"{name}.yaml"
    raw = yaml.safe_load((EXPERIMENTS / "demo_flow.yaml").read_text())
    raw["train"] |= {"seeds": seeds} | train
    path.write_text(yaml.safe_dump(raw))
    (folder / "demo_codec.yaml").write_text((EXPERIMENTS / "demo_codec.yaml").read_text())
    return path


def test_an_experiment_with_seeds_is_itself_and_one_more_for_each_other(tmp_path: Path) -> None:
    path = seeded(tmp_path, [0, 1, 2])
    ledger = seeds_in(path)
    assert ledger is not None and ledger.name == "mine-seeds"
    [row] = ledger.plan()["rows"]
    own, *others = row["runs"]
    assert own == "mine" and len(set(others)) == 2 and all(name.startswith("mine-") for name in others)
    found = load_all([path], [ledger])
    assert set(found) == {"mine", *others, "demo_codec"}
    for name, seed in zip(others, (1, 2), strict=True):
        experiment = found[name][1]
        assert (experiment.train.seed, experiment.sample.seed, experiment.train.seeds) == (seed, seed, ())
        assert experiment.system == found["mine"][1].system
    assert "seeds" not in dump(found["mine"][1].train), "a seed more trains nothing again"
    more = seeds_in(seeded(tmp_path, [0, 1, 2, 5]))
    assert more is not None and more.plan()["rows"][0]["runs"][:3] == row["runs"]
    assert seeds_in(EXPERIMENTS / "demo_flow.yaml") is None


def test_mistakes_in_seeds_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine.yaml: train.seeds are \[1, 2\], without train.seed 0. Set that to one"):
        seeds_in(seeded(tmp_path, [1, 2]))
    with pytest.raises(ValueError, match=r"mine.yaml: train.seeds are \[0, 0\], one of them twice"):
        seeds_in(seeded(tmp_path, [0, 0]))


def test_a_row_may_be_another_experiment_that_is_judged_alike(tmp_path: Path) -> None:
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    seeded(experiments, [0, 1], "one")
    seeded(experiments, [0, 1], "two", grad_clip=0.5)
    path = tmp_path / "both.yaml"
    raw: dict[str, Any] = {"base": "one", "seeds": [0, 1], "rows": [{"name": "theirs", "experiment": "two"}]}
    path.write_text(yaml.safe_dump(raw))
    ledger = expand(path, experiments)
    theirs = [run.experiment for run in ledger.runs if run.row == "theirs"]
    assert [each.train.grad_clip for each in theirs] == [0.5, 0.5] and [each.train.seed for each in theirs] == [0, 1]
    row = ledger.plan()["rows"][1]
    assert row["experiment"] == "two" and row["changes"] == {"experiment": "two"}
    assert all(name.startswith("two-") for name in row["runs"])
    of_seeds = seeds_in(experiments / "two.yaml")
    assert of_seeds is not None and of_seeds.runs[1].name == row["runs"][1], "one run of one seed, whoever asks for it"
    other = yaml.safe_load((experiments / "two.yaml").read_text())
    (experiments / "two.yaml").write_text(yaml.safe_dump(other | {"evaluate": {"neighbours": 5}}))
    with pytest.raises(ValueError, match="row theirs: two is judged on other data, or otherwise, than one"):
        expand(path, experiments)
    path.write_text(yaml.safe_dump(raw | {"rows": [{"name": "theirs", "experiment": "two1"}]}))
    with pytest.raises(ValueError, match=r"row theirs: experiment is two1, but .*Did you mean two"):
        expand(path, experiments)
    path.write_text(yaml.safe_dump(raw | {"rows": [{"name": "theirs"}]}))
    with pytest.raises(ValueError, match="The row theirs needs either changes of the base or another experiment"):
        expand(path, experiments)
