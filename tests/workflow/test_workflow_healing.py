"""Files that were damaged or removed outside Snakemake are made again by the same command, with the same bytes."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from projects import Project

from image_diffusion.core.files.atomic import read_json, write_json

pytestmark = pytest.mark.slow

AFTER_SAMPLE = {"sample", "evaluate", "track", "report", "summary"}
AFTER_TRAIN = {"train", *AFTER_SAMPLE}
EVERYTHING = {"crop", "datasheet", "detect", "reference", *AFTER_TRAIN}


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, and restore its access and modification times."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:  # the same file, of the same size
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    before = path.stat()
    os.truncate(path, before.st_size // 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def forget_runs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM runs")


def of_other_weights(path: Path) -> None:
    """Replace a file by one of other weights, if it can be read, and restore its times."""
    before = path.stat()
    with suppress(ValueError):
        content = read_json(path)
        (content["protocol"]["weights"] if "protocol" in content else content).update(sha256="0", weights_sha256="0")
        write_json(path, content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_an_hour(path: Path) -> None:
    """Date a file one hour ahead, as if written while the clock was wrong."""
    os.utime(path, (time.time() + 3600,) * 2)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], set[str]]] = {
    "a bit of a shard": ("datasets/dots-16/crops/shard-00001.tar", flip, EVERYTHING),
    "a shard removed": ("datasets/dots-16/crops/shard-00000.tar", Path.unlink, EVERYTHING),
    "a record removed": ("datasets/dots-16/crops/shard-00000.json", Path.unlink, EVERYTHING),
    "the index": ("datasets/dots-16/crops/index.npy", flip, EVERYTHING),
    "a manifest": ("datasets/dots-16/crops/manifest.json", flip, EVERYTHING),
    "a sheet": ("datasets/dots-16/crops/sheet.png", flip, EVERYTHING),
    "the detector": (
        "datasets/dots-16/detector/detector.safetensors",
        flip,
        {"detect", "reference", *AFTER_SAMPLE} - {"sample"},
    ),
    "what it saw": (
        "datasets/dots-16/references/inpipe/train-features.npy",
        flip,
        {"reference", *AFTER_SAMPLE} - {"sample"},
    ),
    "weights": ("micro/train/weights.safetensors", cut, AFTER_TRAIN),
    "what describes the weights": ("micro/train/model.json", flip, AFTER_TRAIN),
    "samples": ("micro/samples/samples.npz", flip, AFTER_SAMPLE),
    "how they were made": ("micro/samples/samples.json", flip, AFTER_SAMPLE),
    "samples of other weights": ("micro/samples/samples.json", of_other_weights, AFTER_SAMPLE),
    "a picture of them": ("micro/samples/grid.png", flip, AFTER_SAMPLE),
    "metrics": ("micro/metrics.json", flip, AFTER_SAMPLE - {"sample"}),
    "metrics of other weights": ("micro/metrics.json", of_other_weights, AFTER_SAMPLE - {"sample"}),
    "a picture of the evaluation": ("micro/evaluation/classes.png", flip, AFTER_SAMPLE - {"sample"}),
    "what was tracked": ("micro/tracked.json", flip, {"track"}),
    "a store that was removed": ("../mlflow.db", Path.unlink, {"track"}),
    "a store that was emptied": ("../mlflow.db", forget_runs, {"track"}),
    "a page": ("micro/report/index.html", flip, {"report"}),
    "the summary": ("summary.html", cut, {"summary"}),
    "a plan": ("micro/config/plan.json", flip, set()),
    "a configuration": ("micro/config/train.yaml", flip, set()),
    "how a reference is made": ("datasets/dots-16/config/reference-inpipe.yaml", flip, set()),
    "what was resolved": (".resolved.json", flip, set()),
    "metrics from the future": ("micro/metrics.json", in_an_hour, AFTER_SAMPLE - {"sample"}),
    "a configuration from the future": ("micro/config/train.yaml", in_an_hour, set()),  # its content is unchanged
    "the note of the source": ("datasets/dots-16/source.json", cut, set()),
}


def test_each_damage_reruns_its_stages(finished: Project) -> None:
    for what, (name, damage, expected) in DAMAGES.items():
        path = finished / "results" / name
        before, times = path.read_bytes(), path.stat()
        damage(path)
        planned = finished.planned()
        assert planned == expected, what
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert finished.planned() == set()


@pytest.mark.smoke
def test_results_damaged_at_once_are_restored(finished: Project, made: Project) -> None:
    cut(finished / "results/datasets/dots-16/.source-cache.json")
    for name, damage, _ in DAMAGES.values():
        path = finished / "results" / name
        if path.exists():  # one damage may have removed it
            damage(path)
    said = finished.run()
    assert "results/datasets/dots-16/crops/manifest.json is made again: " in said
    assert "Nothing to be done" in finished.run()
    assert results(finished) == results(made)
    with closing(sqlite3.connect(finished / "mlflow.db")) as database:
        sent = {run for (run,) in database.execute("SELECT run_uuid FROM runs")}
    runs = json.loads((finished / "results/micro/tracked.json").read_text())["runs"]
    assert {run["run_id"] for run in runs} == sent
    assert {run["stage"] for run in runs} == {"crop", "datasheet", "train", "sample", "evaluate"}


def results(project: Project) -> dict[str, bytes]:
    """Return the contents that the workflow reproduces: all files but those with times, paths or runs of MLflow."""
    root = project / "results"
    told = {
        "journal",
        ".journal",
        "tracked.json",
        ".verified.json",
        "source.json",
        ".source-cache.json",
        "owner.json",
        ".owner",
    }
    told |= {"summary.html", "index.html", ".journal"}
    files = (path for path in root.rglob("*") if path.is_file() and not told & {*path.relative_to(root).parts})
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
