"""Runs planned for MLflow, from the journals alone: parents, names, headline metrics and files."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from image_diffusion.core.files.atomic import digest, write_json
from image_diffusion.core.journal import writer as journal_module
from image_diffusion.core.journal.writer import Journal
from image_diffusion.tracking.plan import _runs_in, data_sets, plan, registered_name, score_of, used_by


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1000)
    monkeypatch.setattr(journal_module, "_now_ms", lambda: next(ticks))


def stage(folder: Path, name: str, seed: int = 0, step: int = 10, resume: int | None = None, **values: float) -> None:
    with Journal.open(folder / "journal", name, resume_step=resume) as journal:
        journal.params({"seed": seed})
        journal.metrics(values, step=step)


def test_training_run_is_the_parent_and_shows_metrics_of_its_children(tmp_path: Path) -> None:
    experiment, data = tmp_path / "results" / "demo", tmp_path / "results" / "datasets" / "digits-32"
    stage(data, "crop", images=100)
    stage(experiment, "train", loss=0.5)
    stage(experiment, "sample", **{"speed/images_per_s": 3.0})
    stage(experiment, "evaluate", **{"eval/fid": 7.0, "recall": 0.5, "system/rss": 9.0})
    planned = plan(experiment, [data])
    assert [each.name for each in planned] == ["crop digits-32", "demo", "sample demo", "evaluate demo"]
    crop, train, sample, evaluate = planned
    assert (crop.parent, train.parent) == (None, None)
    assert sample.parent == evaluate.parent == train.history.id
    assert [(point.key, point.step) for point in train.points] == [
        ("loss", 10),
        ("eval/fid", 10),
        ("evaluate/recall", 10),
    ]


def test_child_runs_belong_to_the_preceding_training(tmp_path: Path) -> None:
    experiment = tmp_path / "demo"
    stage(experiment, "train", seed=0, loss=1)
    stage(experiment, "evaluate", seed=0, fid=10)
    stage(experiment, "train", seed=1, loss=2)
    stage(experiment, "evaluate", seed=1, fid=20)
    stage(experiment, "train", seed=0, resume=10)  # the first configuration again, already trained
    stage(experiment, "evaluate", seed=2, fid=30)
    by_name = {each.name: each for each in plan(experiment, []) if each.parent is None}
    assert list(by_name) == ["demo", "demo (2)"]
    values = {name: [point.value for point in each.points] for name, each in by_name.items()}
    assert values == {"demo": [1, 10, 30, 30, 10], "demo (2)": [2, 20]}  # own, evaluated, final and best


def test_score_comes_from_the_last_evaluation_even_of_an_earlier_step(tmp_path: Path) -> None:
    stage(tmp_path / "demo", "train", loss=1)
    stage(tmp_path / "demo", "evaluate", step=30, fid=5)
    stage(tmp_path / "demo", "evaluate", seed=1, step=20, fid=7)  # chosen by a sweep over checkpoints
    training = plan(tmp_path / "demo", [])[0]
    assert score_of(training, "fid") == 7


def test_child_run_without_training_has_no_parent(tmp_path: Path) -> None:
    stage(tmp_path / "demo", "evaluate", fid=1)
    (only,) = plan(tmp_path / "demo", [])
    assert (only.name, only.parent) == ("evaluate demo", None)


def test_files_changed_after_recording_are_reported_and_left_out(tmp_path: Path) -> None:
    experiment = tmp_path / "demo"
    for name in ("kept", "changed", "gone"):
        (tmp_path / name).write_text(name)
    with Journal.open(experiment / "journal", "train") as journal:
        for name in ("kept", "changed", "gone"):
            journal.artifact(tmp_path / name)
    (tmp_path / "changed").write_text("other")
    (tmp_path / "gone").unlink()
    (experiment / "config").mkdir()
    (experiment / "config" / "train.yaml").write_text("steps: 1\n")
    (only,) = plan(experiment, [])
    assert [file.name for file in only.files] == ["kept", "config/train.yaml"]
    assert only.missing == ["changed", "gone"]


def test_result_files_belong_to_the_latest_run_only(tmp_path: Path) -> None:
    experiment = tmp_path / "demo"
    stage(experiment, "evaluate", seed=0)
    stage(experiment, "evaluate", seed=1)
    (experiment / "metrics.json").write_text("{}")
    first, second = plan(experiment, [])
    assert ([file.name for file in first.files], [file.name for file in second.files]) == ([], ["metrics.json"])


def test_journal_is_not_reported_missing_before_weights_are_written(tmp_path: Path) -> None:
    """The follower may read the folder while it still holds the weights of the previous training."""
    (tmp_path / "train").mkdir()
    write_json(tmp_path / "train/model.json", {"fingerprint": "before"})

    def damaged() -> list[str]:
        return [line for run in _runs_in(tmp_path) for line in run.history.damaged]

    before, now = (Journal.open(tmp_path / "journal", "train", tags={"fingerprint": run}) for run in ("before", "now"))
    for journal in (before, now):
        journal.metrics({"loss": 1.0}, step=1)
        journal.close()
    assert damaged() == []
    (tmp_path / "journal/train/attempt-0001.jsonl").unlink()
    assert damaged() == [f"attempt {before.id[:8]}"]
    shutil.rmtree(tmp_path / ".journal")  # a journal of an older version has no receipts
    assert damaged() == ["run before"]


def test_damaged_manifest_of_another_experiment_only_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("crops", "tokens"):
        (tmp_path / name).mkdir()
        content = {"shards": [], "kind": name, "num_samples": 1, "classes": [], "shape": [3, 8, 8]}
        write_json(tmp_path / name / "manifest.json", content)
    assert [each.name for each in data_sets(tmp_path)] == [f"{tmp_path.name}/crops", f"{tmp_path.name}/tokens"]
    (tmp_path / "tokens/manifest.json").write_text("{")
    assert [each.name for each in data_sets(tmp_path)] == [f"{tmp_path.name}/crops"]
    assert "tokens/manifest.json is damaged" in capsys.readouterr().err


def test_a_training_on_two_joined_sets_names_both(tmp_path: Path) -> None:
    for name in ("crops", "features", "tokens"):
        (tmp_path / name).mkdir()
        content = {"shards": [], "kind": name, "num_samples": 1, "classes": [], "shape": [3, 8, 8]}
        write_json(tmp_path / name / "manifest.json", content)
    crops, features, _ = sets = list(data_sets(tmp_path))
    with Journal.open(tmp_path / "journal", "train") as journal:
        journal.params({"digest": digest([crops.digest, features.digest])})
    with Journal.open(tmp_path / "journal", "evaluate", tags={"manifest_digest": crops.digest}) as journal:
        journal.metrics({"fid": 1.0}, 1)
    of_stage = {each.history.stage: used_by(each.history, sets) for each in _runs_in(tmp_path)}
    assert of_stage == {"train": [crops, features], "evaluate": [crops]}


@pytest.mark.parametrize(
    ("project", "name"),
    [("demo", "demo.fid"), ("Anna's models", "Anna_s models.fid"), ("a/b:c", "a_b_c.fid"), ("..x", "_x.fid")],
)
def test_registered_name_is_accepted_by_mlflow(project: str, name: str) -> None:
    assert registered_name(project, [], "fid") == name


@pytest.mark.parametrize("key", ["loss", "evaluate/fid", "bits: a", "x" * 250])
def test_key_that_mlflow_accepts_is_unchanged(key: str) -> None:
    from image_diffusion.tracking.runs import _name  # imports MLflow

    assert _name(key) == key


def test_keys_that_mlflow_refuses_stay_different() -> None:
    from mlflow.utils.validation import _validate_metric_name

    from image_diffusion.tracking.runs import _name

    keys = ["n<5", "n>5", "बाल", "बिल", "a//b", "a/../b", "a/", "/a", "..", "../a", ".", "", "x" * 251, "x" * 252]
    names = [_name(key) for key in keys]
    assert len(set(names)) == len(keys)
    for name in names:
        _validate_metric_name(name)
    assert _name("evaluate/n<5").startswith("evaluate/n_5-")
