"""What MLflow is to hold, by journals and results alone: runs, their parents, tags, files and final weights.

The train run is the parent; sample and evaluate are its children, whose headline metrics it shows at the step of the
checkpoint they used; stages of a data set are runs of their own. Nothing here knows of MLflow.
"""

from __future__ import annotations

import functools
import getpass
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from image_diffusion.core import plain_yaml
from image_diffusion.core.errors import tell_once
from image_diffusion.core.files import digest, read_json, sha256_file
from image_diffusion.core.history import History, Point, of_weights, read_journals
from image_diffusion.data.records import content_digest
from image_diffusion.tracking.shown import measured, scalars, shown

PARENT = "train"
TRACE = "trace/"
"""What the names of tags begin with that no person reads: hashes, and the commit."""
_WEIGHTS = ("weights.safetensors", "model.json")
_RESULTS = {  # what is shown of a stage, beside what its journal names
    "train": ("train/model.json",),
    "sample": ("samples/samples.json", "samples/grid.png"),
    "evaluate": ("metrics.json",),
}
_OWN = ("speed/", "system/", "examples_seen")  # metrics of a child that say nothing about the model


@dataclass(frozen=True)
class Request:
    """What is to be sent.

    experiment: results/<experiment>. datasets: results/datasets/<name> of each data set it used. codec_weights: the
    weights folder of the experiment that trained its codec. embeddings: results/<experiment> of the one that makes
    those that its images are made of. best_metric: of evaluate, lower is better. largest: bytes;
    files above it stay where they are, and their place and sha256 are noted.
    """

    experiment: Path
    datasets: Sequence[Path] = ()
    codec_weights: Path | None = None
    best_metric: str = "fid"
    largest: int = 64 * 2**20
    embeddings: Path | None = None


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
    its children. params: its own and, of the latest training, those of its data and of its children's own sections;
    changed: those that have got another value since. missing: names of recorded files that are gone or hold something
    else now.
    """

    name: str
    history: History
    latest: bool
    points: list[Point]
    superseded: list[Point]
    params: Mapping[str, Any]
    changed: Mapping[str, Any]
    files: list[File] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    parent: str | None = None


@dataclass(frozen=True)
class DataSet:
    """Shards that a run may have used: their name, the digest of their manifest, their folder, and what a person reads
    of them: counts of samples and classes, the shape of a sample."""

    name: str
    digest: str
    folder: Path
    profile: Mapping[str, int | str]


@dataclass(frozen=True)
class FinalWeights:
    """The weights that a run ended with, or of a step before.

    key: says which ones; never changes. files: what is sent of them, by name in the model. made: milliseconds since
    1970.
    """

    key: str
    name: str
    run_id: str
    step: int
    made: int
    tags: Mapping[str, str]
    files: Mapping[str, Path]


def plan(experiment: Path, datasets: Sequence[Path], headline: str = "fid") -> list[PlannedRun]:
    """The runs that MLflow is to hold, parents before their children. Reads journals and results, sends nothing.

    headline: the metric of evaluate that the experiment is ranked by.
    """
    of_data = [replace(each, name=f"{each.history.stage} {data.name}") for data in datasets for each in _runs_in(data)]
    own = _runs_in(experiment)
    trained = [each for each in own if each.history.stage == PARENT]
    children = [
        replace(each, name=f"{each.history.stage} {experiment.name}", parent=_parent_of(each, trained))
        for each in own
        if each.history.stage != PARENT
    ]
    parents = []
    for number, each in enumerate(trained, start=1):
        mine = [child for child in children if child.parent == each.history.id]
        params, changed = _gathered(each, [*(of_data if each.latest else ()), *mine])
        parents.append(
            replace(
                each,
                params=params,
                changed=changed,
                name=experiment.name if number == 1 else f"{experiment.name} ({number})",
                points=_shown(each, mine, headline),
                superseded=[
                    *each.superseded,
                    *(point for child in mine for point in _headline(child, child.superseded)),
                ],
            )
        )
    return of_data + parents + children


def request_of(results: Path, experiment: str) -> Request:
    """What to send of an experiment, from the plan that `configure` wrote."""
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
    """The folders of the journals that there are. Raises ValueError when there is none."""
    found = {folder / "journal" for folder in (request.experiment, *request.datasets)}
    folders = sorted(folder for folder in found if folder.is_dir())
    if not folders:
        raise ValueError(f"{request.experiment / 'journal'} does not exist. Run a stage of the experiment first.")
    return folders


def watched(request: Request) -> frozenset[tuple[Path, int, int]] | None:
    """What there is to send: files with their sizes and times. None: nothing since `tracked.json` was written."""
    folders = (request.experiment, *request.datasets)
    results = [request.experiment / name for names in _RESULTS.values() for name in names]
    found = [*results, *(path for folder in folders for path in folder.glob("journal/*/attempt-*.jsonl"))]
    states = {path: path.stat() for path in found if path.is_file()}
    newest = max((state.st_mtime_ns for state in states.values()), default=0)
    tracked = request.experiment / "tracked.json"
    if not states or (tracked.is_file() and tracked.stat().st_mtime_ns > newest):
        return None
    return frozenset((path, state.st_size, state.st_mtime_ns) for path, state in states.items())


def registered_name(project: str, used: Sequence[DataSet], metric: str) -> str:
    """Under which name models are registered that can be compared: of one data set, by one metric."""
    data = [used[0].name.partition("/")[0]] if used else []
    return re.sub(r"[/:]", "_", ".".join([project, *data, metric]))


def score_of(each: PlannedRun, metric: str) -> float | None:
    """What evaluate found last."""
    scores = [(point.step, point.time, point.value) for point in each.points if point.key == f"evaluate/{metric}"]
    return max(scores)[2] if scores else None


def final_weights(each: PlannedRun, run_id: str, request: Request) -> FinalWeights | None:
    """The weights that a training ended with, and what it takes to use them; None when they are not there."""
    return _weights(each, run_id, request, request.experiment / "train", request.experiment.name)


def swept_weights(each: PlannedRun, run_id: str, request: Request) -> dict[int, FinalWeights]:
    """Those of the earlier steps that a sweep over checkpoints judged, by step; none of any other run."""
    if each.history.stage != "sweep-checkpoint" or not each.latest:
        return {}
    name, folder = request.experiment.name, request.experiment / "sweep" / "checkpoint"
    steps = sorted({point.step for point in each.points})  # others may lie there still, of a sweep before
    found = {
        step: _weights(each, run_id, request, folder / str(step) / "weights", f"{name} at step {step}")
        for step in steps
    }
    return {step: weights for step, weights in found.items() if weights is not None}


def _weights(each: PlannedRun, run_id: str, request: Request, folder: Path, name: str) -> FinalWeights | None:
    sampling = request.experiment / "config" / "sample.yaml"
    if not all((folder / name).is_file() for name in _WEIGHTS):
        return None
    content = read_json(folder / "model.json")
    files = {name: folder / name for name in (*_WEIGHTS, *_carried(folder))}
    if sampling.is_file():
        files["sample.yaml"] = sampling
        weaker = plain_yaml.from_text(sampling.read_text(encoding="utf-8"))["sample"].get("weaker_weights")
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
    others = [_sha256(path) for name, path in files.items() if name not in _WEIGHTS]  # another sampler, another model
    key = "/".join([each.history.id, tags["sha256"], digest(others)])
    ended = each.history.ended or each.history.starts[0]
    return FinalWeights(key, name, run_id, int(content["step"]), ended, tags, files)


def _carried(folder: Path) -> list[str]:
    """The names of the files that go with the weights in a folder."""
    described = folder / "model.json"
    return list(read_json(described).get("carried", {})) if described.is_file() else []


def _runs_in(folder: Path) -> list[PlannedRun]:
    """The runs of every stage that has a journal in a results folder, by when they began."""
    planned = []
    for stage in sorted(path for path in (folder / "journal").glob("*") if path.is_dir()):
        histories = read_journals(stage)
        weights = folder / "train" / "model.json"
        if histories and stage.name == "train" and weights.is_file():
            model = read_json(weights)
            # A training may just have ended, and its weights not yet lie where those of the one before do.
            if not any(each.tags.get("fingerprint") == model.get("fingerprint") for each in histories):
                histories[-1] = of_weights(histories[-1], model)
        for history in histories:
            latest = history is histories[-1]
            kept = [file for file in _recorded(history) if file.path.is_file() and _sha256(file.path) == file.sha256]
            missing = [file.name for file in _recorded(history) if file not in kept]
            files = [*kept, *(_results(folder, history, kept) if latest else ())]
            run = PlannedRun(
                history.stage,
                history,
                latest,
                history.points,
                history.superseded,
                history.params,
                history.changed,
                files,
                missing,
            )
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


def data_sets(folder: Path) -> Iterator[DataSet]:
    """What was made of a data set, by whichever experiment. A damaged manifest is told and left out: the stage that
    wrote it makes it again.
    """
    for manifest in sorted(folder.glob("*/manifest.json")):
        try:
            content = read_json(manifest)
        except ValueError as error:
            tell_once(f"warning: {error} It is not shown.")
            continue
        profile = {
            "samples": content["num_samples"],
            "classes": len(content.get("classes", ())),
            "shape": " x ".join(map(str, content["shape"])),
        }
        yield DataSet(
            f"{folder.name}/{manifest.parent.name}", content_digest(content), manifest.parent.resolve(), profile
        )


def used_by(history: History, data: Sequence[DataSet]) -> list[DataSet]:
    """Those of the data sets that a run names; of two that were joined, what it learned from before what lay beside."""
    named = {str(value) for value in (*history.params.values(), *history.tags.values())}
    joined = [pair for pair in permutations(data, 2) if digest([each.digest for each in pair]) in named]
    return [each for each in data if each.digest in named] + [each for pair in joined for each in pair]


def _parent_of(child: PlannedRun, trained: Sequence[PlannedRun]) -> str | None:
    """The training whose attempt was the last to begin before the child did."""
    began = child.history.starts[-1]
    before = [(start, each.history.id) for each in trained for start in each.history.starts if start <= began]
    return max(before)[1] if before else None


def _shown(each: PlannedRun, children: Sequence[PlannedRun], headline: str) -> list[Point]:
    """What the run of a training shows of its own points and of its children's."""
    own = shown(each.points)
    theirs = measured([point for child in children for point in _headline(child, child.points)], headline)
    ended = each.history.status == "finished"
    return [*own, *theirs, *(scalars([*own, *theirs], headline) if ended else ())]


def _gathered(each: PlannedRun, others: Sequence[PlannedRun]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a training with those of other stages, and what of them has got another value since: crop's, as
    `data.resolution`, and what stages say of the section that is called like them."""
    params, changed = dict(each.params), dict(each.changed)
    for other in others:
        stage = other.history.stage
        for key, value in {**other.params, **other.changed}.items():
            shown = f"data.{key}" if stage == "crop" else key
            if stage != "crop" and not key.startswith(f"{stage}."):
                continue
            if params.setdefault(shown, value) != value:
                changed[shown] = value
    return params, changed


def _headline(child: PlannedRun, points: Sequence[Point]) -> Iterator[Point]:
    """A child's metrics as its parent shows them: `fid` of evaluate is `evaluate/fid`."""
    for point in points:
        if not point.key.startswith(_OWN):
            yield replace(point, key=point.key if "/" in point.key else f"{child.history.stage}/{point.key}")


def tags_of(each: PlannedRun, experiment: Path) -> dict[str, str]:
    """What a person reads of a run, and under `trace/` what tells it from others."""
    history = each.history
    trace = {"config_digest": digest(history.params), **history.tags}
    if "digest" in history.params:
        trace["manifest_digest"] = str(history.params["digest"])
    tags = {
        **{f"{TRACE}{key}": value for key, value in trace.items()},
        "stage": history.stage,
        "rule": history.stage,
        "experiment": experiment.name,
        "attempts": str(len(history.starts)),
        "mlflow.runName": each.name,
        "mlflow.source.name": f"image_diffusion.{history.stage}",
        "mlflow.source.type": "JOB",
        "mlflow.user": getpass.getuser(),
    }
    if history.damaged:
        tags["damaged_lines"] = ", ".join(history.damaged)
    if "git_commit" in trace:
        tags["mlflow.source.git.commit"] = trace["git_commit"]
    return tags | {f"changed/{key}": str(value) for key, value in each.changed.items()}
