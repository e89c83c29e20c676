"""Notes of runs in MLflow: description, headline metric, rank among other runs, and how to reproduce the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.journal.writer import Journal
from image_diffusion.tracking.plan import Request, plan
from image_diffusion.tracking.run_summary import Headline, card, headline_of, ranked
from tiny_models import write_model


def judged(experiment: Path, value: float | None, interval: tuple[float, float] | None, **more: Any) -> None:
    sha256 = read_json(experiment / "train/model.json")["sha256"]
    entry = {"value": value, "interval": interval, **more}
    write_json(experiment / "metrics.json", {"metrics": {"fd": entry}, "protocol": {"weights": {"sha256": sha256}}})


def trained(results: Path, name: str, value: float, interval: tuple[float, float] | None) -> Path:
    """Write the files and journals of a finished experiment, and return its folder."""
    experiment = results / name
    write_model(experiment, step=10, seed=len(name))
    with Journal.open(experiment / "journal", "train") as journal:
        journal.params({"train": {"steps": 10}})
        journal.metrics({"train/loss": 0.5}, step=10)
    for stage, key in (("sample", "num_samples"), ("evaluate", "neighbours")):
        with Journal.open(experiment / "journal", stage) as journal:
            journal.params({stage: {key: 4}, "other": {"left": "out"}})
            journal.metrics({"fd": value} if stage == "evaluate" else {"examples_seen": 1}, step=10)
    judged(experiment, value, interval)
    return experiment


def test_headline_needs_the_current_weights_and_a_reliable_detector(tmp_path: Path) -> None:
    assert headline_of(tmp_path, "fd") is None
    write_model(tmp_path, step=10)
    judged(tmp_path, 1.23456, (1, 2))
    found = headline_of(tmp_path, "fd")
    assert found == Headline("fd", 1.23456, (1, 2)) and str(found) == "fd 1.235, 95 % interval 1 to 2"
    assert headline_of(tmp_path, "other") is None
    judged(tmp_path, 1.2, (1, 2), doubt="the judge guesses")
    assert headline_of(tmp_path, "fd") is None
    judged(tmp_path, 1.2, None)
    assert str(headline_of(tmp_path, "fd")) == "fd 1.2"
    write_model(tmp_path, step=20, seed=1)
    assert headline_of(tmp_path, "fd") is None, "it is of the weights before these"


def test_overlapping_intervals_are_within_noise() -> None:
    others = [
        ("worse", Headline("fd", 9, (8, 10))),
        ("near", Headline("fd", 4.5, (3.5, 5.5))),
        ("better", Headline("fd", 1, (0.5, 1.5))),
        ("unknown", Headline("fd", 2)),
    ]
    assert ranked(Headline("fd", 4, (3, 5)), others) == (
        "Number 3 of 5 runs on this data: better than worse (9); within noise of near (4.5); worse than better (1); "
        "not comparable with unknown (2), as an interval is missing."
    )
    assert ranked(Headline("fd", 4), []) == "No other run on this data has been evaluated by it."
    many = [(f"run{i}", Headline("fd", 9 + i, (9 + i, 9 + i))) for i in range(7)]
    assert "run4 (13) and 2 more." in ranked(Headline("fd", 4, (3, 5)), many)


def test_unfinished_training_has_a_card(tmp_path: Path) -> None:
    text = card(tmp_path / "results/my run", "digits-32", "fd", [])
    assert text.startswith("The training of `my run` on digits-32, which has not ended.\n")
    assert "**Not evaluated yet** by fd." in text
    assert "`snakemake --cores all 'my run'`" in text


def test_headline_that_becomes_doubtful_is_removed(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from image_diffusion.tracking.tracker import Tracker

    client = MlflowClient(store := f"sqlite:///{tmp_path / 'mlflow.db'}")
    first, second = (trained(tmp_path, name, 5.0, (4.5, 5.5)) for name in ("first", "second"))

    def send(experiment: Path) -> dict[str, str]:
        tracked = Tracker(store, "cards").send(Request(experiment, [], best_metric="fd"))
        run = next(each for each in tracked["runs"] if each["stage"] == "train")
        return client.get_run(run["run_id"]).data.tags

    assert send(first)["headline"].startswith("fd 5")
    judged(first, 0.4, (0.3, 0.5), doubt="real images score as much")
    tags = send(first)
    assert {tags[key] for key in ("headline", "trace/headline", "trace/compared")} == {""}
    assert "**No headline** by fd: real images score as much." in tags["mlflow.note.content"]
    tags = send(second)
    assert "No other run" in tags["mlflow.note.content"]
    write_json(second / "metrics.json", {})
    assert send(second)["headline"] == ""
    third = trained(tmp_path, "third", 5.0, None)
    judged(third, 5.0, None, doubt="the judge guesses")
    assert "headline" not in send(third)


def test_mlflow_shows_cards_descriptions_and_the_parameters_of_all_sections(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from image_diffusion.tracking.tracker import Tracker

    store, results = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "results"
    data = results / "datasets" / "dots-8"
    with Journal.open(data / "journal", "crop") as journal:
        journal.params({"resolution": 8})
    client = MlflowClient(store)

    def send(experiment: Path) -> Any:
        tracked = Tracker(store, "cards").send(Request(experiment, [data], best_metric="fd"))
        run = next(each for each in tracked["runs"] if each["stage"] == "train")
        return client.get_run(run["run_id"])

    send(trained(results, "first", 5.0, (4.5, 5.5)))
    run = send(trained(results, "second", 3.0, (2.5, 3.5)))
    note = run.data.tags["mlflow.note.content"]
    assert "`second`: a dit trained for 10 steps, 640 examples." in note
    assert "**fd 3, 95 % interval 2.5 to 3.5** (lower is better). Number 1 of 2 runs" in note
    assert "better than first (5)." in note and "snakemake --cores all second" in note
    assert "Number 2 of 2 runs" in send(results / "first").data.tags["mlflow.note.content"]
    assert run.data.params == {
        "train.steps": "10",
        "data.resolution": "8",
        "sample.num_samples": "4",
        "evaluate.neighbours": "4",
    }
    hashes = [key for key in run.data.tags if "sha256" in key or "digest" in key or "commit" in key]
    assert all(key.startswith(("trace/", "mlflow.")) for key in hashes) and hashes
    (model,) = client.search_registered_models()
    assert "a version each" in model.description
    assert all("a dit trained" in each.description for each in client.search_model_versions(f"name = '{model.name}'"))
    assert "Trainings of image diffusion models" in client.get_experiment_by_name("cards").tags["mlflow.note.content"]

    client.set_tag(run.info.run_id, "mlflow.note.content", "My own words.")
    assert send(results / "second").data.tags["mlflow.note.content"] == "My own words."


def test_parameters_changed_by_a_second_sampling_are_reported(tmp_path: Path) -> None:
    experiment = trained(tmp_path, "mine", 5.0, None)
    with Journal.open(experiment / "journal", "sample") as journal:
        journal.params({"sample": {"num_samples": 9}})
    parent = next(each for each in plan(experiment, []) if each.parent is None)
    assert parent.params["sample.num_samples"] == 4 and dict(parent.changed) == {"sample.num_samples": 9}


@pytest.mark.parametrize("text", ["{", "[]", '{"metrics": []}'])
def test_unreadable_metrics_give_no_headline(tmp_path: Path, text: str) -> None:
    write_model(tmp_path, step=10)
    (tmp_path / "metrics.json").write_text(text)
    assert headline_of(tmp_path, "fd") is None
