"""Plan the contents of MLflow from journals and results: runs, their parents, tags, files and final weights.

The train run is the parent; sample and evaluate are its children, whose headline metrics it shows at the step of the
checkpoint they used; stages of a data set are separate runs. This module does not use MLflow.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from image_diffusion.core.config import yaml12
from image_diffusion.core.files.atomic import digest, read_json, sha256_file, sha256_once
from image_diffusion.core.files.checksums import manifest_digest
from image_diffusion.core.journal.reader import (
    Artifact,
    History,
    Point,
    history_for_weights,
    logged_stages,
    read_journals,
)
from image_diffusion.core.names import carried_files
from image_diffusion.core.process.commands import module_of
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.tracking.run_summary import measured, scalars, shown_points
from image_diffusion.workflow.plans import used_weights

PARENT = "train"
TRACE = "trace/"
"""Prefix of the names of tags that are not meant for people: hashes and the commit."""
_WEIGHTS = ("weights.safetensors", "model.json")
_RESULTS = {  # results of a stage to show, in addition to those in its journal
    "train": ("train/model.json",),
    "sample": ("samples/samples.json", "samples/grid.png"),
    "evaluate": ("metrics.json",),
}
_OWN = ("speed/", "system/", "examples_seen")  # metrics of a child that do not describe the model


@dataclass(frozen=True)
class Request:
    """Request to send an experiment.

    experiment: results/<experiment>. datasets: results/datasets/<name> of each data set it used. codec_weights: the
    weights folder of the experiment that trained its codec. embeddings: results/<experiment> of the experiment that
    makes its embeddings. best_metric: of evaluate, lower is better. largest: bytes; larger files are not sent, only
    their path and sha256.
    """

    experiment: Path
    datasets: Sequence[Path] = ()
    codec_weights: Path | None = None
    best_metric: str = "fid"
    largest: int = 64 * 2**20
    embeddings: Path | None = None


@dataclass(frozen=True)
class PlannedRun:
    """A run for MLflow: a stage of the experiment, or of its data set, with all its attempts.

    history: its attempts, merged; history.id never changes and is the run's key. latest: True if the results folder
    belongs to this run. parent: the id of its parent's history. points, superseded: its own and the headline metrics of
    its children. params: its own and, for the latest training, those of its data and of its children's sections;
    changed: params whose value has changed since. files: to show. missing: names of recorded files that are missing or
    have changed.
    """

    name: str
    history: History
    latest: bool
    points: list[Point]
    superseded: list[Point]
    params: Mapping[str, Any]
    changed: Mapping[str, Any]
    files: list[Artifact] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    parent: str | None = None


@dataclass(frozen=True)
class DataSet:
    """Shards that a run may have used, or a set of synthetic images that it made. digest: of the manifest or the
    checksums. profile: facts for people, such as the numbers of samples and classes and the shape of a sample."""

    name: str
    digest: str
    folder: Path
    profile: Mapping[str, int | str]


@dataclass(frozen=True)
class FinalWeights:
    """The final weights of a run, or weights of an earlier step.

    key: identifies them; never changes. files: to send, by name in the model. made: milliseconds since 1970.
    """

    key: str
    name: str
    run_id: str
    step: int
    made: int
    tags: Mapping[str, str]
    files: Mapping[str, Path]


def plan(experiment: Path, datasets: Sequence[Path], headline: str = "fid") -> list[PlannedRun]:
    """Return the runs for MLflow, parents before their children, from journals and results; nothing is sent.

    headline: the metric of evaluate that the experiment is ranked by.
    """
    of_data = [replace(run, name=f"{run.history.stage} {data.name}") for data in datasets for run in _runs_in(data)]
    own = _runs_in(experiment)
    trained = [run for run in own if run.history.stage == PARENT]
    children = [
        replace(run, name=f"{run.history.stage} {experiment.name}", parent=_parent_of(run, trained))
        for run in own
        if run.history.stage != PARENT
    ]
    parents = []
    for number, training in enumerate(trained, start=1):
        own_children = [child for child in children if child.parent == training.history.id]
        params, changed = _merged_params(training, [*(of_data if training.latest else ()), *own_children])
        parents.append(
            replace(
                training,
                params=params,
                changed=changed,
                name=experiment.name if number == 1 else f"{experiment.name} ({number})",
                points=_shown(training, own_children, headline),
                superseded=[
                    *training.superseded,
                    *(point for child in own_children for point in _headline(child, child.superseded)),
                ],
            )
        )
    return of_data + parents + children


def request_of(results: Path, experiment: str) -> Request:
    """Return the request for an experiment, from the plan that `configure` wrote."""
    plan = read_json(results / experiment / "config" / "plan.json")
    codec = plan["codec_experiment"]
    weights = results / codec / "train" if codec else None
    prior = plan["embeddings_experiment"]
    return Request(
        results / experiment,
        [results / "datasets" / plan["dataset"]],
        weights,
        plan["headline"],
        embeddings=results / prior if prior else None,
    )


def journals(request: Request) -> list[Path]:
    """Return the existing folders of journals. Raises ValueError if none exists."""
    candidates = {folder / "journal" for folder in (request.experiment, *request.datasets)}
    folders = sorted(folder for folder in candidates if logged_stages(folder))
    if not folders:
        raise ValueError(f"{request.experiment / 'journal'} does not exist. Run a stage of the experiment first.")
    return folders


def watched(request: Request) -> frozenset[tuple[Path, int, int]] | None:
    """Return the files to send with their sizes and times; None if none is newer than `tracked.json`."""
    folders = (request.experiment, *request.datasets)
    results = [request.experiment / name for names in _RESULTS.values() for name in names]
    paths = [*results, *(path for folder in folders for path in folder.glob("journal/*/attempt-*.jsonl"))]
    states = {path: path.stat() for path in paths if path.is_file()}
    newest = max((state.st_mtime_ns for state in states.values()), default=0)
    tracked = request.experiment / "tracked.json"
    if not states or (tracked.is_file() and tracked.stat().st_mtime_ns > newest):
        return None
    return frozenset((path, state.st_size, state.st_mtime_ns) for path, state in states.items())


def registered_name(project: str, used: Sequence[DataSet], metric: str) -> str:
    """Return the name of the registered model for comparable models: of one data set, by one metric. Characters that
    MLflow refuses in names or in filters become "_"."""
    data = [used[0].name.partition("/")[0]] if used else []
    return re.sub(r"^\.{2,}|[/:']", "_", ".".join([project, *data, metric]))


def score_of(run: PlannedRun, metric: str) -> float | None:
    """Return the latest score of evaluate; of an earlier step, if a sweep over checkpoints chose it."""
    scores = [(point.time, point.step, point.value) for point in run.points if point.key == f"evaluate/{metric}"]
    return max(scores)[2] if scores else None


def final_weights(run: PlannedRun, run_id: str, request: Request) -> FinalWeights | None:
    """Return the final weights of a training and the files needed to use them; None if they are missing."""
    return _weights(run, run_id, request, used_weights(request.experiment), request.experiment.name)


def swept_weights(run: PlannedRun, run_id: str, request: Request) -> dict[int, FinalWeights]:
    """Return the weights of the steps that a sweep over checkpoints evaluated, by step; empty for any other run."""
    if run.history.stage != "sweep-checkpoint" or not run.latest:
        return {}
    name, folder = request.experiment.name, request.experiment / "sweep" / "checkpoint"
    steps = sorted({point.step for point in run.points})  # weights of an earlier sweep may remain there
    by_step = {
        step: _weights(run, run_id, request, folder / str(step) / "weights", f"{name} at step {step}") for step in steps
    }
    return {step: weights for step, weights in by_step.items() if weights is not None}


def _weights(run: PlannedRun, run_id: str, request: Request, folder: Path, name: str) -> FinalWeights | None:
    sampling = request.experiment / "config" / "sample.yaml"
    if not all((folder / name).is_file() for name in _WEIGHTS):
        return None
    content = read_json(folder / "model.json")
    files = {name: folder / name for name in (*_WEIGHTS, *_carried(folder))}
    if sampling.is_file():
        files["sample.yaml"] = sampling
        weaker = yaml12.from_text(sampling.read_text(encoding="utf-8"))["sample"].get("weaker_weights")
        files |= {f"weaker/{name}": Path(weaker) / name for name in _WEIGHTS if weaker}
    if request.embeddings is not None:
        embeds = request.embeddings / "train"
        files |= {f"embeds/{name}": embeds / name for name in (*_WEIGHTS, *_carried(embeds))}
        files["embeds/sample.yaml"] = request.embeddings / "config" / "sample.yaml"
    if request.codec_weights is not None:
        files |= {f"codec/{name}": request.codec_weights / name for name in _WEIGHTS}
    tags = {
        "sha256": str(content["sha256"]),
        "step": str(content["step"]),
        "experiment": request.experiment.name,
        "system": str(content["system"]["type"]),
    }
    others = [sha256_once(path) for name, path in files.items() if name not in _WEIGHTS]  # such as sample.yaml
    key = "/".join([run.history.id, tags["sha256"], digest(others)])
    ended = run.history.ended or run.history.starts[0]
    return FinalWeights(key, name, run_id, int(content["step"]), ended, tags, files)


def _carried(folder: Path) -> list[str]:
    """Return the names of the files that accompany the weights in a folder."""
    described = folder / "model.json"
    return list(carried_files(folder, read_json(described))) if described.is_file() else []


def _runs_in(folder: Path) -> list[PlannedRun]:
    """Return the runs of every stage that has a journal in a results folder, by start time."""
    planned = []
    stages = logged_stages(folder / "journal")
    for name, (result, *_) in _RESULTS.items():
        if (folder / result).is_file() and folder / "journal" / name not in stages:
            log_line_once(
                f"warning: {folder / result} exists, but its journal {folder / 'journal' / name} is missing, and so "
                f"is its run in MLflow."
            )
    for stage in stages:
        histories = read_journals(stage)
        weights = folder / "train" / "model.json"
        if histories and stage.name == "train" and weights.is_file():
            model = read_json(weights)
            # If a training has just ended, the weights in the folder may still be those of the previous training.
            if not any(history.tags.get("fingerprint") == model.get("fingerprint") for history in histories):
                histories[-1] = history_for_weights(histories[-1], model)
        for history in histories:
            latest = history is histories[-1]
            recorded = history.artifacts
            intact = [file for file in recorded if file.path.is_file() and sha256_once(file.path) == file.sha256]
            missing = [file.name for file in recorded if file not in intact]
            files = [*intact, *(_results(folder, history, intact) if latest else ())]
            own = {name: getattr(history, name) for name in ("points", "superseded", "params", "changed")}
            planned.append(PlannedRun(history.stage, history, latest, **own, files=files, missing=missing))
    return sorted(planned, key=lambda run: (run.history.starts[0], run.history.id))


def _results(folder: Path, history: History, intact: Sequence[Artifact]) -> Iterator[Artifact]:
    """Yield the configuration and the results of the stage that are not in its journal."""
    listed = {file.path.resolve() for file in intact}
    for name in (f"config/{history.stage}.yaml", *_RESULTS.get(history.stage, ())):
        path = folder / name
        if path.is_file() and path.resolve() not in listed:
            yield Artifact(name, path, path.stat().st_size, sha256_once(path))


def data_sets(folder: Path) -> Iterator[DataSet]:
    """Yield the results made of a data set by any experiment. A damaged manifest is reported and left out: its stage
    makes it again.
    """
    for manifest in sorted(folder.glob("*/manifest.json")):
        try:
            content = read_json(manifest)
        except ValueError as error:
            log_line_once(f"warning: {error} MLflow does not show it.")
            continue
        profile = {
            "samples": content["num_samples"],
            "classes": len(content.get("classes", ())),
            "shape": " x ".join(map(str, content["shape"])),
        }
        yield DataSet(
            f"{folder.name}/{manifest.parent.name}", manifest_digest(content), manifest.parent.resolve(), profile
        )


def synthetic_sets(experiment: Path) -> Iterator[DataSet]:
    """Yield the sets of synthetic images of an experiment, released or quarantined."""
    for sums in (experiment / name / "SHA256SUMS" for name in ("synthetic", "quarantine")):
        if sums.is_file():
            num_files = len(sums.read_bytes().splitlines())
            name = f"{experiment.name}/{sums.parent.name}"
            yield DataSet(name, sha256_file(sums), sums.parent.resolve(), {"files": num_files})


def used_by(history: History, data: Sequence[DataSet]) -> list[DataSet]:
    """Return the data sets that a run names, or whose checksums it wrote; for two joined data sets, the one it trains
    on first, then the other."""
    named = {str(value) for value in (*history.params.values(), *history.tags.values())}
    named |= {artifact.sha256 for artifact in history.artifacts}
    joined = [pair for pair in permutations(data, 2) if digest([data_set.digest for data_set in pair]) in named]
    return [data_set for data_set in data if data_set.digest in named] + [half for pair in joined for half in pair]


def _parent_of(child: PlannedRun, trained: Sequence[PlannedRun]) -> str | None:
    """Return the training with the last attempt that began before the child's last attempt."""
    began = child.history.starts[-1]
    starts = [(start, training.history.id) for training in trained for start in training.history.starts]
    before = [start for start in starts if start[0] <= began]
    return max(before)[1] if before else None


def _shown(training: PlannedRun, children: Sequence[PlannedRun], headline: str) -> list[Point]:
    """Return the points of a training's run: its own and its children's."""
    own = shown_points(training.points)
    of_children = measured([point for child in children for point in _headline(child, child.points)], headline)
    ended = training.history.status == "finished"
    return [*own, *of_children, *(scalars([*own, *of_children], headline) if ended else ())]


def _merged_params(training: PlannedRun, others: Sequence[PlannedRun]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of a training with those of other stages, and those whose value has changed since: of crop
    with the prefix `data.`, and of each stage those of the section with its name."""
    params, changed = dict(training.params), dict(training.changed)
    for other in others:
        stage = other.history.stage
        for key, value in {**other.params, **other.changed}.items():
            name = f"data.{key}" if stage == "crop" else key
            if stage != "crop" and not key.startswith(f"{stage}."):
                continue
            if params.setdefault(name, value) != value:
                changed[name] = value
    return params, changed


def _headline(child: PlannedRun, points: Sequence[Point]) -> Iterator[Point]:
    """Yield a child's metrics under the names used by its parent: `fid` of evaluate is `evaluate/fid`."""
    for point in points:
        if not point.key.startswith(_OWN):
            yield replace(point, key=point.key if "/" in point.key else f"{child.history.stage}/{point.key}")


def tags_of(run: PlannedRun, experiment: Path) -> dict[str, str]:
    """Return the tags of a run: tags for people, and tags under `trace/` that distinguish it from other runs."""
    history = run.history
    trace = {"config_digest": digest(history.params), **history.tags}
    if "digest" in history.params:
        trace["manifest_digest"] = str(history.params["digest"])
    tags = {
        **{f"{TRACE}{key}": value for key, value in trace.items()},
        "stage": history.stage,
        "rule": history.stage,
        "experiment": experiment.name,
        "attempts": str(len(history.starts)),
        "mlflow.runName": run.name,
        "mlflow.source.name": module_of(history.stage),
        "mlflow.source.type": "JOB",
        "mlflow.user": getpass.getuser(),
    }
    if history.damaged:
        tags["damaged_lines"] = ", ".join(history.damaged)
    if history.loss:
        tags["incomplete"] = history.loss
    if "git_commit" in trace:
        tags["mlflow.source.git.commit"] = trace["git_commit"]
    return tags | {f"changed/{key}": str(value) for key, value in run.changed.items()}
