"""Studies expand to experiments named by their changes; an error is one line that names the variant."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from image_diffusion.core.journal.writer import Journal
from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.experiments.resolve import load_all
from image_diffusion.experiments.study import Expanded, expand, operations_of, schema
from image_diffusion.workflow.plans import write_partial_pages

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "config" / "experiments"
VARIANTS = [
    {"name": "qk-norm", "changes": {"system.network.qk_norm": True}, "source": "somewhere"},
    {"name": "swiglu", "changes": {"system": {"network": {"mlp": "swiglu"}}}},
]
GOOD: dict[str, Any] = {"base": "demo_flow", "seeds": [0, 1], "budget": {"steps": 9}, "variants": VARIANTS}


def expanded(folder: Path, name: str = "mine", **changes: Any) -> Expanded:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return expand(path, EXPERIMENTS)


def test_each_variant_and_seed_becomes_an_experiment_with_only_its_change(tmp_path: Path) -> None:
    runs = {(run.variant, run.seed): run.experiment for run in expanded(tmp_path).runs}
    assert list(runs) == [(variant, seed) for variant in ("base", "qk-norm", "swiglu") for seed in (0, 1)]
    base = load_experiment(EXPERIMENTS / "demo_flow.yaml")
    for (variant, seed), experiment in runs.items():
        assert experiment.train == base.train.model_copy(update={"steps": 9, "seed": seed})
        assert experiment.sample == base.sample.model_copy(update={"seed": seed})
        assert (experiment.data, experiment.codec, experiment.evaluate) == (base.data, base.codec, base.evaluate)
        network: Any = experiment.system.network  # type: ignore[attr-defined]
        assert (network.qk_norm, network.mlp) == (variant == "qk-norm", "swiglu" if variant == "swiglu" else "gelu")


def test_studies_and_variants_with_equal_changes_share_runs(tmp_path: Path) -> None:
    one = expanded(tmp_path, "one")
    dotted = [{"name": "another name", "changes": {"system.network.mlp": "swiglu"}}]
    other = expanded(tmp_path, "other", variants=dotted, seeds=[1, 2])
    names = [{(run.variant, run.seed): run.name for run in each.runs} for each in (one, other)]
    assert names[0]["base", 1] == names[1]["base", 1]
    assert names[0]["swiglu", 1] == names[1]["another name", 1]
    assert len({*names[0].values(), *names[1].values()}) == 6 + 4 - 2
    assert len(load_all([], [one, other])) == 8 + 1, "and the experiment of the codec"


def test_a_budget_of_operations_gives_costly_variants_fewer_steps(tmp_path: Path) -> None:
    wide = [{"name": "wide", "changes": {"system.network.width": 256}}]
    runs = expanded(tmp_path, variants=wide, seeds=[0], budget={"operations": 1e11}).runs
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
        ({"variants": [], "rows": VARIANTS}, "rows is called variants now."),
        ({"sedes": [1]}, "sedes is not a known key. Did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds are [1, 1], one of them twice."),
        ({"variants": [VARIANTS[0], VARIANTS[0]]}, "Two variants are called qk-norm. Give each a name of its own."),
        ({"variants": [VARIANTS[0], VARIANTS[0] | {"name": "b"}]}, "The variants qk-norm and b change the same."),
        ({"variants": [VARIANTS[0] | {"name": "base"}]}, "Two variants are called base."),
        ({"budget": {"steps": 3, "operations": 5}}, "steps and operations are both set"),
        ({"budget": {"operations": 5}}, "variant base: a step takes "),
        (
            {"variants": [{"name": "a", "changes": {"system.network.qk_nrm": True}}]},
            "variant a: system.network.qk_nrm is not a known key. Did you mean system.network.qk_norm?",
        ),
        ({"variants": [{"name": "a", "changes": {"train.": 1}}]}, "'train.' names no key."),
        (
            {"variants": [{"name": "a", "changes": {"evaluate.reference": "validation", "evaluate.neighbours": 30}}]},
            "variant a is evaluated otherwise than the base: evaluate.reference ('validation' here, ",
        ),
        ({"metrics": ["inpipe_reacll"]}, "metrics: 'inpipe_reacll' is not a metric. "),
        (
            {"metrics": ["bits_per_dim", "copies", "inpipe_fd", "fid"]},
            "mine.yaml: metrics names fid, which evaluate of the base does not measure. Name a metric of one of "
            "evaluate.detectors (inpipe_fd, …), or add its detector.",
        ),
        (
            {"variants": [{"name": "a", "changes": {"train.steps": 4}}]},
            "variant a is the same as variant base, with the budget",
        ),
        (
            {"variants": [{"name": "a", "changes": {"train.seed": 7}}], "seeds": [3, 4], "budget": {}},
            "variant a is the same as variant base, with the budget",
        ),
        (
            {"variants": [{"name": "a", "changes": {"system.network.qk_norm": False}}], "seeds": [3, 4]},
            "variant a is the same as variant base, with the budget",
        ),
        (
            {"changes": {"sample.num_samples": 50}, "variants": [{"name": "a", "changes": {"sample.num_samples": 70}}]},
            "variant a: sample.num_samples is 70, but 50 for the base, and distances depend on it. Set it in changes",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        expanded(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path}/mine.yaml: ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "changes", "metrics"),
    [
        ("demo_flow", {}, ["inpipe_class_fd", "inpipe_copies", "copies", "bits_per_dim", "psnr"]),
        ("demo_flow", {"evaluate.detectors": ["inpipe", "inception"]}, ["fid", "kid", "inception_recall"]),
        ("demo_codec", {}, ["inpipe_agreement_mean", "inpipe_reconstruction_fd_mean", "psnr_mean"]),
    ],
)
def test_metrics_with_and_without_detectors_can_be_compared(
    tmp_path: Path, base: str, changes: dict[str, Any], metrics: list[str]
) -> None:
    assert expanded(tmp_path, base=base, changes=changes, metrics=metrics, variants=[]).study.metrics == tuple(metrics)


def test_different_data_under_one_name_is_an_error_of_the_variant(tmp_path: Path) -> None:
    study = expanded(tmp_path, variants=[{"name": "other crops", "changes": {"data.num_shards": 5}}])
    with pytest.raises(ValueError, match="mine.yaml: variant other crops: "):
        load_all([], [study])


@pytest.mark.parametrize("path", sorted((ROOT / "config/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_expand(path: Path) -> None:
    study = expand(path, EXPERIMENTS)
    load_all([], [study])
    assert study.plan()["variants"][0]["name"] == "base"


@pytest.mark.parametrize("path", sorted((ROOT / "config/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_match_the_editor_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), schema())


def test_study_of_seeds_reuses_the_run_of_its_experiment(tmp_path: Path) -> None:
    study = expanded(tmp_path, variants=[], budget={})
    [base] = study.plan()["variants"]
    own, other = base["runs"]
    assert own == "demo_flow" and other.startswith("demo_flow-")
    experiments = load_all([EXPERIMENTS / "demo_flow.yaml"], [study])
    assert set(experiments) == {"demo_flow", other, "demo_codec"}
    assert experiments[other][1].system == experiments[own][1].system
    more = expanded(tmp_path, variants=[], budget={}, seeds=[0, 1, 5])
    assert more.plan()["variants"][0]["runs"][:2] == base["runs"]


@pytest.mark.parametrize(("seeds", "name"), [([0, 1], "config/studies/NAME.yaml"), ([], "study=NAME")])
def test_seeds_in_an_experiment_are_rejected_with_the_study_to_use(tmp_path: Path, seeds: list[int], name: str) -> None:
    path = another(tmp_path, "mine", seeds=seeds)
    with pytest.raises(ValueError, match=r"mine.yaml: train.seeds is a study now") as caught:
        load_experiment(path)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def another(folder: Path, name: str, **train: Any) -> Path:
    path = folder / f"{name}.yaml"
    raw = yaml.safe_load((EXPERIMENTS / "demo_flow.yaml").read_text())
    raw["train"] |= train
    path.write_text(yaml.safe_dump(raw))
    (folder / "demo_codec.yaml").write_text((EXPERIMENTS / "demo_codec.yaml").read_text())
    return path


def test_variant_may_be_another_experiment_with_the_same_evaluation(tmp_path: Path) -> None:
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    another(experiments, "one")
    another(experiments, "two", grad_clip=0.5)
    path = tmp_path / "both.yaml"
    raw: dict[str, Any] = {"base": "one", "seeds": [0, 1], "variants": [{"name": "theirs", "experiment": "two"}]}
    path.write_text(yaml.safe_dump(raw))
    study = expand(path, experiments)
    theirs = [run.experiment for run in study.runs if run.variant == "theirs"]
    assert [each.train.grad_clip for each in theirs] == [0.5, 0.5] and [each.train.seed for each in theirs] == [0, 1]
    row = study.plan()["variants"][1]
    assert row["experiment"] == "two" and row["changes"] == {"experiment": "two"}
    assert row["runs"][0] == "two" and row["runs"][1].startswith("two-")
    path.write_text(yaml.safe_dump({"base": "two", "seeds": [0, 1]}))
    assert [run.name for run in expand(path, experiments).runs] == row["runs"], (
        "one run of one seed, whoever asks for it"
    )
    path.write_text(yaml.safe_dump(raw))
    other = yaml.safe_load((experiments / "two.yaml").read_text())
    (experiments / "two.yaml").write_text(yaml.safe_dump(other | {"evaluate": {"neighbours": 5}}))
    with pytest.raises(ValueError, match="variant theirs: two is judged on other data, or otherwise, than one"):
        expand(path, experiments)
    (experiments / "two.yaml").write_text(yaml.safe_dump(other | {"sample": other["sample"] | {"num_samples": 7}}))
    with pytest.raises(ValueError, match="variant theirs: sample.num_samples is 7, but 300 for the base"):
        expand(path, experiments)
    path.write_text(yaml.safe_dump(raw | {"changes": {"sample.num_samples": 50}}))
    assert len(expand(path, experiments).runs) == 4, "all make as many now"
    path.write_text(yaml.safe_dump(raw | {"variants": [{"name": "theirs", "experiment": "two1"}]}))
    with pytest.raises(ValueError, match=r"variant theirs: experiment is two1, but .*Did you mean two"):
        expand(path, experiments)
    path.write_text(yaml.safe_dump(raw | {"variants": [{"name": "theirs"}]}))
    with pytest.raises(ValueError, match="The variant theirs needs either changes of the base or another experiment"):
        expand(path, experiments)


def made(folder: Path, *runs: str) -> Path:
    """Write a study of one metric with results of these runs only, and return its folder."""
    study = folder / "results/studies/mine"
    study.mkdir(parents=True)
    names = ("base", "other")
    variants: list[dict[str, Any]] = [{"name": name, "source": None, "changes": {}, "runs": [name]} for name in names]
    plan = {"study": "mine", "base": "base", "seeds": [0], "metrics": ["fid"], "variants": variants}
    (study / "plan.json").write_text(json.dumps(plan | {"budget": {"steps": None, "operations": None}}))
    for name in runs:
        (folder / "results" / name / "train").mkdir(parents=True)
        metrics = {"metrics": {"fid": {"value": 5.0, "interval": None}}}
        (folder / "results" / name / "metrics.json").write_text(json.dumps(metrics))
        (folder / "results" / name / "train/model.json").write_text(json.dumps({"step": 9, "examples_seen": 90}))
    return study


@pytest.mark.parametrize(("resume", "seconds"), [(None, "12.5"), (4, "")])
def test_cost_of_a_resumed_training_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: int | None, seconds: str
) -> None:
    monkeypatch.chdir(tmp_path)
    study = made(tmp_path, "base")
    for step in (None, resume):
        with Journal.open(Path("results/base/journal"), "train", step) as journal:
            journal.metrics({"loss": 1.0}, step=9)
    (tmp_path / "benchmarks/base").mkdir(parents=True)
    (tmp_path / "benchmarks/base/train.tsv").write_text("h:m:s\tcpu_time\n0:00:20\t12.5\n")
    write_partial_pages("results", ["mine"], ROOT / "workflow/scripts/study.py", ROOT / "src")
    base = next(csv.DictReader((study / "study.csv").read_text().splitlines()))
    assert base["cpu_seconds"] == seconds


def test_partial_study_page_is_not_mistaken_for_the_final_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One output is missing, so that the rule runs again even if its inputs are those of an earlier page."""
    monkeypatch.chdir(tmp_path)
    study = made(tmp_path, "base")
    (study / "study.md").write_text("of before\n")
    write_partial_pages("results", ["mine"], ROOT / "workflow/scripts/study.py", ROOT / "src")
    assert "not made yet" in (study / "index.html").read_text()
    assert (study / "study.csv").is_file() and not (study / "study.md").exists()
