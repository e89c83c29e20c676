"""Send what the stages logged to MLflow. Sending again adds nothing; what could not be sent is sent the next time.

    python -m image_diffusion.track --store sqlite:///mlflow.db --project demo \
        --experiment results/demo --dataset results/datasets/digits-32 --output results/demo/tracked.json

The train run is the parent; sample and evaluate are its children, whose headline metrics it shows at the step of the
checkpoint they used; stages of a data set are runs of their own. With `--follow` the command goes on until it is
stopped, and shows training while it runs. Training knows nothing of all this: it writes its journal.
"""

from __future__ import annotations

import argparse
import functools
import getpass
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_diffusion.core.command import run
from image_diffusion.core.files import digest, read_json, sha256_file, write_json
from image_diffusion.core.history import History, Point, read_journals

if TYPE_CHECKING:
    from image_diffusion.mlflow_store import Store

_PARENT = "train"
_RESULTS = {  # what is shown of a stage, beside what its journal names
    "train": ("train/model.json", "train/weights.safetensors"),
    "sample": ("samples/samples.json", "samples/grid.png"),
    "evaluate": ("metrics.json",),
}
_OWN = ("speed/", "system/", "examples_seen")  # metrics of a child that say nothing about the model
_ENDINGS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}


@dataclass(frozen=True)
class File:
    """A file to show: its name in MLflow, where it lies, what it holds."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class PlannedRun:
    """What MLflow is to hold about one run.

    history: its attempts, merged; history.id never changes and is the run's key. latest: whether the results folder
    is of this run. parent: the id of its parent's history. points, superseded: its own and the headline metrics of
    its children. missing: names of recorded files that are gone or hold something else now.
    """

    name: str
    history: History
    latest: bool
    points: list[Point]
    superseded: list[Point]
    files: list[File] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    parent: str | None = None


@dataclass(frozen=True)
class DataSet:
    """Shards that a run may have used: their name, the digest of their manifest, their folder."""

    name: str
    digest: str
    folder: Path


def plan(experiment: Path, datasets: Sequence[Path]) -> list[PlannedRun]:
    """The runs that MLflow is to hold, parents before their children. Reads journals and results, sends nothing."""
    of_data = [replace(each, name=f"{each.history.stage} {data.name}") for data in datasets for each in _runs_in(data)]
    own = _runs_in(experiment)
    trained = [each for each in own if each.history.stage == _PARENT]
    children = [
        replace(each, name=f"{each.history.stage} {experiment.name}", parent=_parent_of(each, trained))
        for each in own
        if each.history.stage != _PARENT
    ]
    parents = []
    for number, each in enumerate(trained, start=1):
        mine = [child for child in children if child.parent == each.history.id]
        parents.append(
            replace(
                each,
                name=experiment.name if number == 1 else f"{experiment.name} ({number})",
                points=[*each.points, *(point for child in mine for point in _headline(child, child.points))],
                superseded=[
                    *each.superseded,
                    *(point for child in mine for point in _headline(child, child.superseded)),
                ],
            )
        )
    return of_data + parents + children


def send(
    store: Store, planned: Sequence[PlannedRun], experiment: Path, datasets: Sequence[Path], largest: int, champion: str
) -> dict[str, str]:
    """Bring everything planned to the store; returns the MLflow id of every run by its key.

    largest: bytes; files above it stay where they are, and their place and sha256 are noted. champion: the metric
    of evaluate, lower is better, by which the best registered model gets the alias `champion`.
    """
    ids: dict[str, str] = {}
    model: tuple[str, str] | None = None  # of which run, its id
    data = [item for folder in datasets for item in _data_sets(folder)]
    for each in planned:
        history = each.history
        tags = _tags(each, experiment) | ({"mlflow.parentRunId": ids[each.parent]} if each.parent else {})
        run_id = ids[history.id] = store.run(history.id, each.name, history.starts[0], tags)
        small = [file for file in each.files if file.path.stat().st_size <= largest]
        for file in each.files:
            if file not in small:
                tags |= {f"path/{file.name}": str(file.path.resolve()), f"sha256/{file.name}": file.sha256}
        store.send_tags(run_id, tags)
        store.send_params(run_id, history.params)
        named = {str(value) for value in (*history.params.values(), *history.tags.values())}
        used = [item for item in data if item.digest in named]
        for item in used:
            store.send_dataset(run_id, item.name, item.digest, str(item.folder), history.stage)
        model_id = model[1] if model is not None and each.latest and model[0] == each.parent else None
        if model_id is not None:
            store.use_model(run_id, model_id)
        about = (used[0].name, used[0].digest) if used else None
        store.send_points(run_id, each.points, each.superseded, model_id, about)
        store.send_images(run_id, history.images)
        for file in small:
            store.send_file(run_id, file.path, file.name, file.sha256)
        if history.stage == _PARENT and history.status == "finished" and each.latest:
            made = _send_model(store, each, run_id, experiment, champion)
            model = (history.id, made) if made is not None else None
        if history.ended is not None:
            store.send_end(run_id, _ENDINGS[history.status], history.ended)
    return ids


def _send_model(store: Store, each: PlannedRun, run_id: str, experiment: Path, champion: str) -> str | None:
    """Note the final weights as a model made by the run, and register it; they stay where they are."""
    described = experiment / "train" / "model.json"
    if not described.is_file():
        return None
    content = read_json(described)
    step, sha256 = int(content["step"]), str(content["sha256"])
    place = str((experiment / "train" / "weights.safetensors").resolve())
    tags = {
        "path": place,
        "sha256": sha256,
        "step": str(step),
        "experiment": experiment.name,
        "system": _system(content),
    }
    model_id = store.model(f"{each.history.id}/{sha256}", experiment.name, run_id, step, tags)
    shown = f"evaluate/{champion}"
    scores = [(point.step, point.time, point.value) for point in each.points if point.key == shown]
    store.register(model_id, run_id, tags, max(scores)[2] if scores else None)
    return model_id


def _system(content: dict[str, Any]) -> str:
    system = content.get("system", {})
    return str(system.get("type", "unknown"))


def _runs_in(folder: Path) -> list[PlannedRun]:
    """The runs of every stage that has a journal in a results folder, by when they began."""
    planned = []
    for stage in sorted(path for path in (folder / "journal").glob("*") if path.is_dir()):
        histories = read_journals(stage)
        for history in histories:
            latest = history is histories[-1]
            kept = [file for file in _recorded(history) if file.path.is_file() and _sha256(file.path) == file.sha256]
            missing = [file.name for file in _recorded(history) if file not in kept]
            files = [*kept, *(_results(folder, history, kept) if latest else ())]
            run = PlannedRun(history.stage, history, latest, history.points, history.superseded, files, missing)
            planned.append(run)
    return sorted(planned, key=lambda each: (each.history.starts[0], each.history.id))


def _recorded(history: History) -> list[File]:
    return [File(artifact.name, artifact.path, artifact.sha256) for artifact in history.artifacts]


def _results(folder: Path, history: History, kept: Sequence[File]) -> Iterator[File]:
    """The configuration and the results of the stage, as far as its journal does not name them."""
    known = {file.path.resolve() for file in kept}
    for name in (f"config/{history.stage}.yaml", *_RESULTS.get(history.stage, ())):
        path = folder / name
        if path.is_file() and path.resolve() not in known:
            yield File(name, path, _sha256(path))


def _sha256(path: Path) -> str:
    status = path.stat()
    return _sha256_of(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256_of(path: Path, inode: int, size: int, modified: int) -> str:
    return sha256_file(path)


def _data_sets(folder: Path) -> Iterator[DataSet]:
    for manifest in sorted(folder.glob("*/manifest.json")):
        yield DataSet(f"{folder.name}/{manifest.parent.name}", digest(read_json(manifest)), manifest.parent.resolve())


def _parent_of(child: PlannedRun, trained: Sequence[PlannedRun]) -> str | None:
    """The training whose attempt was the last to begin before the child did."""
    began = child.history.starts[-1]
    before = [(start, each.history.id) for each in trained for start in each.history.starts if start <= began]
    return max(before)[1] if before else None


def _headline(child: PlannedRun, points: Sequence[Point]) -> Iterator[Point]:
    """A child's metrics as its parent shows them: `fid` of evaluate is `evaluate/fid`."""
    for point in points:
        if not point.key.startswith(_OWN):
            yield replace(point, key=point.key if "/" in point.key else f"{child.history.stage}/{point.key}")


def _tags(each: PlannedRun, experiment: Path) -> dict[str, str]:
    history = each.history
    tags = {
        "config_digest": digest(history.params),
        **history.tags,
        "stage": history.stage,
        "experiment": experiment.name,
        "attempts": str(len(history.starts)),
        "mlflow.runName": each.name,
        "mlflow.source.name": f"image_diffusion.{history.stage}",
        "mlflow.source.type": "JOB",
        "mlflow.user": getpass.getuser(),
    }
    if "git_commit" in tags:
        tags["mlflow.source.git.commit"] = tags["git_commit"]
    return tags | {f"changed/{key}": str(value) for key, value in history.changed.items()}


def _summary(each: PlannedRun, run_id: str) -> dict[str, Any]:
    history = each.history
    sent = {
        "params": {key: str(value) for key, value in history.params.items()},
        "points": [[point.key, repr(point.value), point.step, point.time] for point in each.points],
        "images": [[image.key, image.step, image.time] for image in history.images],
        "files": [[file.name, file.sha256] for file in each.files],
    }
    return {
        "name": each.name,
        "stage": history.stage,
        "run_id": run_id,
        "status": history.status,
        "attempts": len(history.starts),
        **{name: len(values) for name, values in sent.items()},
        "missing": each.missing,
        "sha256": digest(sent),
    }


def track(options: argparse.Namespace, store: Store | None = None) -> dict[str, Any]:
    """Send once; returns what `tracked.json` holds. store: an open one. Raises OSError when it does not take it."""
    from image_diffusion.mlflow_store import Store, locked

    experiment, datasets = options.experiment, options.dataset
    folders = sorted({folder / "journal" for folder in (experiment, *datasets) if (folder / "journal").is_dir()})
    if not folders:
        raise ValueError(f"{experiment / 'journal'} does not exist. Run a stage of the experiment first.")
    store = store or Store(options.store, options.project)
    with ExitStack() as stack:
        for folder in folders:  # one tracker at a time reads these journals, so that none sends what is superseded
            stack.enter_context(locked(folder / ".lock"))
        planned = plan(experiment, datasets)
        largest = int(options.largest_file_mb * 2**20)
        ids = send(store, planned, experiment, datasets, largest, options.champion_metric)
    runs = [_summary(each, ids[each.history.id]) for each in planned]
    page = f"/#/experiments/{store.experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    return {"format": 1, "store": store.shown_uri, "project": options.project, "page": page, "runs": runs}


def follow(options: argparse.Namespace, stop: threading.Event) -> dict[str, Any] | None:
    """Send every `--follow` seconds until stopped, then once more. A store that fails is told once and tried again."""
    from image_diffusion.mlflow_store import Store

    told, tracked, store = "", None, None
    while True:
        last = stop.is_set()
        try:
            store = store or Store(options.store, options.project)
            tracked, told = track(options, store), ""
        except (OSError, ValueError) as error:
            if last:
                raise
            if str(error) != told:
                told = str(error)
                print(f"warning: {told} Trying again every {options.follow:g} s.", file=sys.stderr, flush=True)
        if last:
            return tracked
        stop.wait(options.follow)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m image_diffusion.track", description=__doc__.split("\n")[0])
    parser.add_argument("--store", required=True, help="MLflow tracking URI, e.g. sqlite:///mlflow.db")
    parser.add_argument("--project", required=True, help="the MLflow experiment that holds the runs")
    parser.add_argument("--experiment", required=True, type=Path, help="folder: results/<experiment>")
    parser.add_argument("--dataset", action="extend", nargs="+", type=Path, default=[], help="results/datasets/<name>")
    parser.add_argument("--output", type=Path, help="summary to write when everything was sent: tracked.json")
    parser.add_argument("--largest-file-mb", type=float, default=64.0, help="larger files are noted, not copied")
    parser.add_argument("--champion-metric", default="fid", help="the registered model with the lowest is `champion`")
    parser.add_argument("--follow", type=float, metavar="SECONDS", help="go on until stopped, sending this often")
    options = parser.parse_args()
    if options.follow is None:
        tracked: dict[str, Any] | None = track(options)
    else:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        tracked = follow(options, stop)
    if tracked is not None:
        if options.output is not None:
            write_json(options.output, tracked)
        runs, points = tracked["runs"], sum(run["points"] for run in tracked["runs"])
        print(f"track: {len(runs)} runs and {points:,} points are in {tracked['store']}, page {tracked['page']}")


if __name__ == "__main__":
    run(main)
