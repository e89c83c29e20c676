"""Metrics of a training run in MLflow: few, and none twice."""

from __future__ import annotations

import math
import time
from pathlib import Path

from mlflow import MlflowClient

from image_diffusion.core.journal.reader import Point
from image_diffusion.core.journal.writer import Journal
from image_diffusion.tracking.plan import Request, plan
from image_diffusion.tracking.run_summary import measured, scalars, shown_points
from image_diffusion.tracking.tracker import Tracker

QUARTERS = [f"{name}_q{i}" for name in ("loss", "mse", "vb") for i in range(4)]
"""Metrics by quartile of time that a hybrid loss logs in addition to its means."""


def series(**values: list[float]) -> list[Point]:
    return [Point(key, value, step, step) for key, row in values.items() for step, value in enumerate(row)]


def keys(points: list[Point]) -> list[str]:
    return list(dict.fromkeys(point.key for point in points))


def test_metrics_equal_to_the_loss_of_their_section_are_left_out() -> None:
    points = series(**{"train/loss": [3, 2], "train/mse": [3, 2], "train/vb": [3, 1], "validation/mse": [3, 2]})
    assert keys(shown_points(points)) == ["train/loss", "train/vb", "validation/mse"]
    assert keys(shown_points(series(loss=[1], odd=[1]))) == ["loss", "odd"]


def test_scalars_hold_the_last_and_best_value() -> None:
    points = series(**{"validation/loss": [3.0, 1.0, 2.0, math.nan], "evaluate/fd": [5.0], "evaluate/kd": [1.0]})
    assert {(p.key, p.value, p.step) for p in scalars(points, "fd")} == {
        ("final/validation_loss", 2.0, 2),
        ("best/validation_loss", 1.0, 2),
    }, "of one number there is nothing to choose"
    assert scalars(points[:0], "fd") == []
    of_earlier_step = [Point("evaluate/fd", 5.0, 30, 1), Point("evaluate/fd", 7.0, 20, 2)]
    final, best = scalars(of_earlier_step, "fd")
    assert (final.value, best.value) == (7.0, 5.0), "the last evaluation may be of weights of an earlier step"


def test_final_and_best_metrics_are_current_even_for_an_earlier_step(tmp_path: Path) -> None:
    client = MlflowClient(store := f"sqlite:///{tmp_path / 'mlflow.db'}")
    with Journal.open(tmp_path / "mine/journal", "train") as journal:
        journal.metrics({"train/loss": 1.0}, step=1000)
    for number, (value, step) in enumerate([(1.686, 1000), (1.9, 1000), (1.2, 500), (1.3, 500)]):
        with Journal.open(tmp_path / "mine/journal", "evaluate", tags={"number": str(number)}) as journal:
            journal.metrics({"fd": value}, step)
        if number > 0:
            tracked = Tracker(store, "p").send(Request(tmp_path / "mine", [], best_metric="fd"))
            run = client.get_run(next(each["run_id"] for each in tracked["runs"] if each["stage"] == "train"))
            shown_now = run.data.metrics["final/fd"], run.data.metrics["best/fd"]
            assert shown_now == (value, min(value, 1.2) if number > 1 else 1.686)
        time.sleep(0.005)  # journal times are in milliseconds


def test_headline_metric_of_evaluate_is_always_shown() -> None:
    points = series(**{f"evaluate/m{i}": [1.0] for i in range(9)} | {"preview/m8": [1.0], "preview/m1": [1.0]})
    assert keys(measured(points, "m8")) == ["evaluate/m0", "evaluate/m1", "evaluate/m8", "preview/m8"]


def test_training_run_shows_three_synthesize_scores() -> None:
    names = ("utility.gain", "utility.gain.lower", "copies", "membership.auc", "recall")
    points = series(**{f"synthesize/{name}": [1.0] for name in names})
    assert keys(measured(points, "fd")) == ["synthesize/utility.gain", "synthesize/copies", "synthesize/membership.auc"]


def test_training_run_shows_at_most_thirty_metrics_and_child_runs_show_all(tmp_path: Path) -> None:
    machine = ["cpu_utilization_percentage", "process_cpu_percentage", "memory_usage_percentage", "process_memory_gib"]
    machine += ["gpu_memory_gib", "gpu_utilization_percentage", "gpu_power_usage_watts"]
    speed = ["examples_per_second", "steps_per_second", "waiting_for_data", "tflops", "share_of_peak"]
    speed += ["slowest_share", "median_share", "slowest_process"]
    names = [f"{section}/{name}" for section in ("train", "validation") for name in ("loss", "mse", "vb", *QUARTERS)]
    names += ["train/grad_norm", "train/learning_rate", *(f"speed/{name}" for name in speed)]
    names += [f"system/{name}" for name in machine]
    with Journal.open(tmp_path / "mine/journal", "train") as journal:
        for step in (1, 2):
            numbers = {name: float(i) for i, name in enumerate(names)}
            journal.metrics(numbers, step, examples_seen=step)
    with Journal.open(tmp_path / "mine/journal", "evaluate") as journal:
        journal.metrics({f"m{i}": 1.0 for i in range(20)} | {"fd": 2.0}, step=2)
        journal.metrics({f"preview/m{i}": 1.0 for i in range(20)} | {"preview/fd": 2.0}, step=1)
    parent, child = plan(tmp_path / "mine", [], "fd")
    assert len(keys(parent.points)) <= 30, keys(parent.points)
    wanted = {"train/loss", "train/loss_q3", "validation/loss", "evaluate/fd", "preview/fd"}
    assert wanted | {"best/validation_loss", "final/validation_loss", "examples_seen"} <= set(keys(parent.points))
    assert len(keys(child.points)) == 42
