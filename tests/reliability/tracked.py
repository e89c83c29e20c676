"""Shared parts of the tests of tracking: an experiment to send, and the expected and actual content of MLflow.

The expected content follows from the logged values; the actual content is read from MLflow's database and folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from image_diffusion.core.journal.writer import Journal
from image_diffusion.tracking.plan import Request
from tiny_models import write_model

STEPS = 360
UPLOADING = ".artifact.uploading."
"""MLflow's name for a file that is not complete, and not shown: a SIGKILL during an upload leaves it."""


def make_experiment(folder: Path, steps: int = STEPS) -> Path:
    """Write an experiment as stages leave it: three stages, two attempts of the first, pictures, weights, a plot."""
    rng = np.random.default_rng(0)
    picture = folder / "picture.png"
    folder.mkdir(parents=True)
    Image.fromarray(rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(picture)
    for resume, first, last in ((None, 1, steps // 2 + 50), (steps // 2, steps // 2 + 1, steps)):
        with Journal.open(folder / "journal", "train", resume_step=resume, tags={"fingerprint": "f"}) as journal:
            journal.params({"train": {"steps": steps, "lr": 1e-4}, **{f"p{i}": i for i in range(120)}})
            for step in range(first, last + 1):
                journal.metrics({"loss": 1 / step, "odd": float("nan")}, step=step, examples_seen=64 * step)
                if step % (steps // 3) == 0:
                    journal.image("samples/ema", picture, step=step)
            journal.artifact(picture, "plots/picture.png")
    write_model(folder, steps)
    for stage in ("sample", "evaluate"):
        with Journal.open(folder / "journal", stage) as journal:
            journal.params({"seed": 0})
            journal.metrics({"fid": 12.5} if stage == "evaluate" else {"speed/images_per_s": 3.0}, step=steps)
    return folder


def track(store: str, experiment: Path) -> dict[str, Any]:
    """Send an experiment once."""
    from image_diffusion.tracking.tracker import Tracker

    return Tracker(store, "faults").send(Request(experiment))


def contents(database: Path) -> dict[str, Any]:
    """Return all active content of an MLflow database and its folder of files, without ids and times of sending."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return connection.execute(query).fetchall()

        active = "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active'"
        names = dict(rows("SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active'"))
        metrics = rows(
            f"SELECT run_uuid, key, timestamp, step, value, is_nan FROM metrics WHERE run_uuid IN ({active})"
        )
        params = rows(f"SELECT run_uuid, key, value FROM params WHERE run_uuid IN ({active})")
        tags = rows(f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN ({active})")
        files = [
            path
            for path in (database.parent / "mlruns").rglob("*")
            if path.is_file() and "artifacts" in path.parts and not path.name.startswith(UPLOADING)
        ]
        return {
            "runs": sorted(
                rows("SELECT name, status, start_time, end_time FROM runs WHERE lifecycle_stage = 'active'")
            ),
            "metrics": Counter((names[run], *row) for run, *row in metrics),
            "params": Counter((names[run], *row) for run, *row in params),
            "tags": {(names[run], key, names.get(value, value)) for run, key, value in tags},
            "files": Counter(
                (
                    names[run],
                    path.relative_to(database.parent).as_posix().partition("/artifacts/")[2],
                    path.read_bytes(),
                )
                for path in files
                for run in names
                if run in path.parts
            ),
            "models": rows("SELECT name, status FROM logged_models WHERE lifecycle_stage = 'active'"),
            "model_files": Counter(
                (path.relative_to(database.parent).as_posix().partition("/artifacts/")[2], path.read_bytes())
                for (model,) in rows("SELECT model_id FROM logged_models WHERE lifecycle_stage = 'active'")
                for path in files
                if model in path.parts and path.name != "MLmodel"
            ),
            "model_metrics": Counter(
                rows(
                    "SELECT experiments.name, metric_name, metric_step, metric_value, dataset_name FROM "
                    "logged_model_metrics JOIN experiments USING (experiment_id)"
                )
            ),
            "versions": rows("SELECT count(*) FROM model_versions WHERE current_stage != 'Deleted_Internal'"),
            "aliases": rows("SELECT name, alias FROM registered_model_aliases"),
        }


def expected_points(experiment: Path) -> dict[str, Counter[tuple[str, int]]]:
    """Return (metric, step) of every run, read from the written journals without the reader under test."""
    steps = range(1, STEPS + 1)
    train = Counter({(key, step): 1 for key in ("loss", "odd", "examples_seen") for step in steps})
    return {
        experiment.name: train + Counter({("evaluate/fid", STEPS): 1}),
        f"evaluate {experiment.name}": Counter({("fid", STEPS): 1}),
        f"sample {experiment.name}": Counter({("speed/images_per_s", STEPS): 1}),
    }


def check_whole(held: dict[str, Any], experiment: Path) -> None:
    from mlflow.entities import LoggedModelStatus

    by_run: dict[str, Counter[tuple[str, int]]] = {}
    for (run, key, _, step, _, _), count in held["metrics"].items():
        by_run.setdefault(run, Counter())[key, step] += count
    assert by_run == expected_points(experiment)
    assert [run[:2] for run in held["runs"]] == [
        (experiment.name, "FINISHED"),
        (f"evaluate {experiment.name}", "FINISHED"),
        (f"sample {experiment.name}", "FINISHED"),
    ]
    names = [name for _, name, _ in held["files"].elements()]
    pictures = [name for name in names if name.endswith(".png") and name.startswith("images/samples~ema+step+")]
    assert sorted(int(name.split("+")[2]) for name in pictures) == [STEPS // 3, 2 * STEPS // 3, STEPS]
    assert len([name for name in names if name.endswith("+compressed.webp")]) == 3
    assert {"plots/picture.png", "train/model.json"} <= set(names)
    assert len(names) == len(set(names)) == 9
    assert (held["models"], held["versions"]) == ([(experiment.name, LoggedModelStatus.READY.to_int())], [(1,)])
    assert held["aliases"] == [("faults.fid", "best")]
    assert held["model_metrics"] == {
        ("faults", "fid", STEPS, 12.5, None): 1,
        ("faults", "speed/images_per_s", STEPS, 3.0, None): 1,
    }
    weights = (experiment / "train" / "weights.safetensors").read_bytes()
    assert held["model_files"]["data/model/weights.safetensors", weights] == 1
    assert {"input_example.json", "serving_input_example.json"} <= {name for name, _ in held["model_files"]}
    assert len(held["model_files"]) == 10
    assert ("sample " + experiment.name, "mlflow.parentRunId", experiment.name) in held["tags"]


def check_same(held: dict[str, Any], other: dict[str, Any]) -> None:
    """Fail with the differences of both; long bytes by their ends."""
    for kind, mine in other.items():
        one, two = (
            Counter(map(_short, each.elements() if isinstance(each, Counter) else each)) for each in (held[kind], mine)
        )
        assert one == two, f"{kind}: {[*(one - two)]} in place of {[*(two - one)]}"
    assert held == other


def _short(item: Any) -> str:
    parts = item if isinstance(item, tuple) else (item,)
    return ", ".join(
        f"{len(part)} bytes {hashlib.sha256(part).hexdigest()[:8]}: {part[:80]!r} ... {part[-80:]!r}"
        if isinstance(part, bytes) and len(part) > 200
        else repr(part)
        for part in parts
    )


def forked(work: Callable[[], object], says: Path = Path(os.devnull)) -> int:
    """Run `work` in a forked process, which has all imports already; return its process id. says: file for its
    output."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stdout = sys.stderr = says.open("w", buffering=1)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
