"""Sweeps of an experiment, and samples made by several jobs: rules with a wildcard for each part and each point."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from projects import Project, make_project

from image_diffusion.core.journal.reader import read_journal

pytestmark = pytest.mark.slow

SWEEP = {"checkpoint": [4, 8], "num_steps": [1], "ema": ["raw", 0.5, 0.9]}
SAMPLE = {"num_samples": 16, "sampler": {"type": "ddim", "num_steps": 2}, "batch_size": 4}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project whose samples were made by two jobs, with three sweeps. Tests do not change it."""
    project = make_project(tmp_path_factory.mktemp("swept") / "project")
    project.edit(lambda experiment: experiment.update(sweep=SWEEP, sample=SAMPLE | {"images_per_job": 8}))
    project.edit(lambda experiment: experiment.update(preview=SAMPLE))
    faster = {
        "grid_every_steps": 4,
        "ema": {"type": "exponential", "rates": [0.5, 0.9], "warmup": None},
        "optimizer": {"type": "adamw", "lr": 0.01},
    }
    project.edit(lambda experiment: experiment["train"].update(faster))
    project.edit(lambda experiment: experiment["train"]["checkpoint"].update(keep_every=4))
    project.run()
    return project


def metrics(path: Path) -> dict[str, float]:
    entries = json.loads(path.read_text())["metrics"]
    return {name: entry["value"] for name, entry in entries.items()}


def test_parallel_sample_jobs_write_one_file_and_leave_nothing_to_do(swept: Project) -> None:
    folder = swept / "results/micro/samples"
    there = {path.name for path in folder.iterdir()}
    assert there - {".verified.json"} == {"grid.png", "samples.json", "samples.npz", "steps.png"}
    with np.load(folder / "samples.npz") as arrays:
        assert arrays["arr_0"].shape == (16, 16, 16, 3) and len(np.unique(arrays["arr_0"], axis=0)) == 16
    assert swept.planned() == set()


def test_a_curve_has_a_point_for_each_value_and_a_best_one(swept: Project) -> None:
    for axis, values in (("checkpoint", ["4", "8"]), ("num_steps", ["1"]), ("ema", ["raw", "0.5", "0.9"])):
        curve = json.loads((swept / f"results/micro/sweep/{axis}/curve.json").read_text())
        assert [point["value"] for point in curve["points"]] == values
        found = {point["value"]: point["metrics"]["inpipe_fd"]["value"] for point in curve["points"]}
        assert curve["best"] == min(found, key=found.__getitem__)
        assert (swept / f"results/micro/sweep/{axis}/curve.png").is_file()
    assert "Metrics against num steps" in (swept / "results/micro/report/index.html").read_text()


def test_sweep_points_equal_metrics_of_samples_and_of_training_curve(
    swept: Project,
) -> None:
    result = swept / "results/micro"
    whole, last = metrics(result / "metrics.json"), metrics(result / "sweep/checkpoint/8/metrics.json")
    assert last.items() <= whole.items()
    early = metrics(result / "sweep/checkpoint/4/metrics.json")
    curve = {point["step"]: point for point in json.loads((result / "metrics.json").read_text())["curve"]}
    for step, at_step in ((4, early), (8, last)):
        for name in ("inpipe_fd", "inpipe_kd", "inpipe_agreement"):
            assert curve[step][name] == pytest.approx(at_step[name], rel=1e-9)
    assert early["inpipe_fd"] != last["inpipe_fd"]
    averages = [metrics(result / f"sweep/ema/{value}/metrics.json") for value in ("raw", "0.5", "0.9")]
    assert averages[1] == last, "the average that was written"
    assert len({each["inpipe_fd"] for each in averages}) == 3
    named = [
        json.loads((result / f"sweep/ema/{value}/weights/model.json").read_text())["ema"] for value in ("raw", "0.9")
    ]
    assert named == [None, "ema-0.9"]


def test_the_best_value_is_tracked(swept: Project) -> None:
    runs = {run["name"]: run for run in json.loads((swept / "results/micro/tracked.json").read_text())["runs"]}
    assert {"sweep-checkpoint micro", "sweep-num_steps micro"} <= set(runs)
    assert runs["sweep-checkpoint micro"]["status"] == "finished" and runs["sweep-checkpoint micro"]["images"] == 1


def test_sample_and_evaluate_journals_record_examples_seen(swept: Project) -> None:
    for stage in ("sample", "evaluate"):
        history = read_journal(swept / "results/micro/journal" / stage)
        assert history is not None
        assert ("examples_seen", 8, 64.0) in {(point.key, point.step, point.value) for point in history.points}


def test_added_sweep_value_runs_its_own_point_only(swept: Project) -> None:
    path = swept / "config/experiments/micro.yaml"
    before = path.read_text()
    try:
        swept.edit(lambda experiment: experiment["sweep"].update(num_steps=[1, 2]))
        expected = {"sweep_sample", "sweep_evaluate", "sweep", "track", "report", "summary"}
        assert swept.planned() == expected
    finally:
        path.write_text(before)
        swept.planned()


def test_chosen_step_is_sampled_and_changed_rule_reuses_points(fresh: Project) -> None:
    def choose(rule: str) -> None:
        fresh.edit(lambda experiment: experiment.update(sweep={"checkpoint": [4, 8], "choose": rule}, sample=SAMPLE))

    def used() -> int:
        result = fresh / "results/micro"
        choice = json.loads((result / "sweep/checkpoint/curve.json").read_text())["choice"]
        model = json.loads((result / "sweep/checkpoint/chosen/weights/model.json").read_text())
        ends = [json.loads((result / f"sweep/checkpoint/{step}/weights/model.json").read_text()) for step in (4, 8)]
        assert model == {4: ends[0], 8: ends[1]}[choice["step"]]
        drawn = json.loads((result / "samples/samples.json").read_text())
        judged = json.loads((result / "metrics.json").read_text())["protocol"]["weights"]
        assert drawn["weights_sha256"] == judged["sha256"] == model["sha256"]
        assert drawn["step"] == judged["step"] == choice["step"]
        page = (result / "report/index.html").read_text()
        assert choice["reason"] in page.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'")
        return int(choice["step"])

    fresh.edit(lambda experiment: experiment["train"]["checkpoint"].update(keep_every=4))
    fresh.edit(lambda experiment: experiment["train"].update(optimizer={"type": "adamw", "lr": 0.01}))
    choose("distance")
    fresh.run("results/micro/report/index.html")
    first = used()
    drawn = [fresh / f"results/micro/{place}/samples.npz" for place in ("samples", f"sweep/checkpoint/{first}")]
    with np.load(drawn[0]) as samples, np.load(drawn[1]) as decided:
        assert not np.array_equal(samples["arr_0"], decided["arr_0"]), "they have other seeds"
    distance = metrics(fresh / f"results/micro/sweep/checkpoint/{first}/metrics.json")["inpipe_fd"]
    choose(f"distance where inpipe_fd.value > {distance!r}")
    again = {"sweep", "sweep_weights", "sample", "evaluate", "report"}
    assert fresh.planned("results/micro/report/index.html") == again
    fresh.run("results/micro/report/index.html")
    assert {first, used()} == {4, 8}
    assert fresh.planned("results/micro/report/index.html") == set()
