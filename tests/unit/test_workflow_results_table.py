"""The final table of evaluated experiments, and the removal of leftover parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.parts import remove_left_parts
from image_diffusion.workflow.terminal import outcome, places
from plans import a_plan, plans_of


def judged(folder: Path, name: str, **measured: Any) -> None:
    write_json(folder / name / "metrics.json", {"metrics": {"inpipe_fd": measured}})


def test_each_evaluated_experiment_has_a_line(tmp_path: Path) -> None:
    plans = plans_of(*map(a_plan, ("whole", "few", "guessed", "running", "damaged")))
    assert outcome(plans, tmp_path) == ""
    judged(tmp_path, "whole", value=12.3456, interval=[12.0, 13.25], doubt=None)
    judged(tmp_path, "few", value=1.5, interval=None, doubt=None)
    judged(tmp_path, "guessed", value=0.25, interval=[0, 1], doubt="the judge guesses")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/metrics.json").write_text("{")
    page = tmp_path / "whole/report/index.html"
    page.parent.mkdir()
    page.touch()
    head, _, *lines = outcome(plans, tmp_path).splitlines()
    assert head.split() == ["experiment", "metric", "value", "95", "%", "interval", "report"]
    assert [line.split() for line in lines] == [
        ["whole", "inpipe_fd", "12.35", "12", "to", "13.25", str(page)],
        ["few", "inpipe_fd", "1.5", "none", "not", "made"],
        ["guessed", "inpipe_fd", "not", "to", "rely", "on", "none", "not", "made"],
    ]
    assert {line.index("inpipe_fd") for line in lines} == {head.index("metric")}


def test_metrics_and_samples_of_earlier_weights_are_not_shown(tmp_path: Path) -> None:
    plans, folder = plans_of(a_plan("mine")), tmp_path / "mine"
    judged(tmp_path, "mine", value=12.3456, interval=[12.0, 13.25], doubt=None)
    measured = json.loads((folder / "metrics.json").read_text())
    (folder / "samples").mkdir()
    (folder / "samples/grid.png").touch()
    for weights, is_shown in (("a" * 64, True), ("b" * 64, False)):
        (folder / "train").mkdir(exist_ok=True)
        write_json(folder / "train/model.json", {"sha256": weights})
        write_json(folder / "metrics.json", measured | {"protocol": {"weights": {"sha256": "a" * 64}}})
        write_json(folder / "samples/samples.json", {"weights_sha256": "a" * 64})
        assert ("12.35" in outcome(plans, tmp_path)) == is_shown
        assert ("of earlier weights" in outcome(plans, tmp_path)) != is_shown
        assert ("grid.png" in places(plans, tmp_path, "sqlite:///mlflow.db")) == is_shown


def test_leftover_latent_marks_are_removed(tmp_path: Path) -> None:
    plans = plans_of(a_plan("mine"))
    for name in (plans.by_name["mine"].dataset, "theirs"):
        (tmp_path / "datasets" / name / "vae").mkdir(parents=True)
        for file in ("part-0-of-2.done", "shard-00000.tar"):
            (tmp_path / "datasets" / name / "vae" / file).touch()
    remove_left_parts(plans, tmp_path)
    assert [path.parts[-3:] for path in sorted(tmp_path.rglob("*.*"))] == [
        (plans.by_name["mine"].dataset, "vae", "shard-00000.tar"),
        ("theirs", "vae", "part-0-of-2.done"),
        ("theirs", "vae", "shard-00000.tar"),
    ]


def test_leftover_reference_parts_are_removed(tmp_path: Path) -> None:
    plans = plans_of(a_plan("mine"))
    for name in (plans.by_name["mine"].dataset, "theirs"):
        folder = tmp_path / "datasets" / name / "references/inception"
        (folder / "parts").mkdir(parents=True)
        for file in ("parts/part-0-of-2.npz", "train.npz"):
            (folder / file).touch()
    remove_left_parts(plans, tmp_path)
    left = sorted(path.relative_to(tmp_path / "datasets").parts for path in tmp_path.rglob("*.npz"))
    assert [(name, file) for name, *_, file in left] == [
        (plans.by_name["mine"].dataset, "train.npz"),
        ("theirs", "part-0-of-2.npz"),
        ("theirs", "train.npz"),
    ]


def test_leftover_sample_parts_are_removed(tmp_path: Path) -> None:
    plans = plans_of(a_plan("mine"))
    for name in ("mine", "theirs"):
        (tmp_path / name / "samples").mkdir(parents=True)
        for file in ("part-0-of-2.npz", "samples.npz"):
            (tmp_path / name / "samples" / file).touch()
        (tmp_path / name / "samples" / ".part-1-of-2.npz.halfway").mkdir()
    remove_left_parts(plans, tmp_path)
    assert [path.name for path in sorted((tmp_path / "mine/samples").iterdir())] == ["samples.npz"]
    assert len(list((tmp_path / "theirs/samples").iterdir())) == 3


def test_leftover_synthetic_parts_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "mine/synthetic_parts"
    (folder / ".part-1-of-2.npz.halfway").mkdir(parents=True)
    (folder / "part-0-of-2.npz").touch()
    remove_left_parts(plans_of(a_plan("mine")), tmp_path)
    assert list(folder.iterdir()) == []
