"""Check that results are as their stages wrote them: Snakemake only notices missing and new files.

Results that were damaged, removed although no rule declares them, or made from other data or weights than those that
are there now (of which Snakemake only compares times) count as unfinished, so that the same command makes them again.
A file is hashed once per stamp, up to a limit at each start: the rest, after results were copied here, is checked by
the stages that read it and at the next starts.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from image_diffusion.core.config.yaml12 import from_text
from image_diffusion.core.files.atomic import digest, is_in_future, is_whole_page, read_checksums, read_json
from image_diffusion.core.files.checksums import AT_ONCE_BYTES, damaged, manifest_digest, unread, warn_about_previews
from image_diffusion.core.files.mirrored import is_mirrored
from image_diffusion.core.names import carried_files
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.plans import Plans, plan_file, read_plan, used_weights

_TIME_OF_A_FOLDER = ".snakemake_timestamp"


class Damage:
    """Checks each result once and reports each fault once. store: URI of the MLflow store."""

    def __init__(self, store: str) -> None:
        self._store, self._known = store, dict[str, bool]()
        self._may_hash = AT_ONCE_BYTES
        self._looks: Mapping[str, Callable[[Path], str | None]] = {
            "manifest.json": self._manifest,
            "detector.json": self._detector,
            "reference.json": self._reference,
            "model.json": self._model,
            "tracked.json": self._tracked,
            "diffusers": self._folder,
            "synthetic": self._folder,
            "samples.json": self._samples,
            "metrics.json": self._metrics,
        }
        self._looks_by_suffix: Mapping[str, Callable[[Path], str | None]] = {".json": self._described, ".html": _page}

    def among(self, outputs: Iterable[str]) -> bool:
        """Return True if one of a job's existing outputs was changed or lacks a file that belongs to it."""
        damaged_ones = [path for path in outputs if Path(path).exists() and self._is_damaged(path)]
        return bool(damaged_ones)

    def fault_of(self, path: Path) -> str | None:
        """Describe the fault of a result, in a few words; None if it is as its stage wrote it.

        A file that is described in another file, such as weights in model.json, is checked with the latter.
        """
        look = self._looks.get(path.name) or self._looks_by_suffix.get(path.suffix)
        try:
            if is_in_future(time if (time := path / _TIME_OF_A_FOLDER).is_file() else path):
                return "it is from the future; a clock was wrong"
            return look(path) if look is not None else None
        except (ValueError, OSError) as error:
            return str(error)
        except (KeyError, TypeError, AttributeError):
            return "it is not complete"

    def _is_damaged(self, path: str) -> bool:
        if path not in self._known:
            fault = self.fault_of(Path(path))
            self._known[path] = fault is not None
            if fault is not None:
                print(f"{path} is made again: {fault}", file=sys.stderr)
        return self._known[path]

    def _manifest(self, path: Path) -> str | None:
        manifest = read_json(path)
        shards = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
        fault = of_other_data(manifest.get("crops"), [path.parent.parent / "crops/manifest.json"])
        fault = fault or _of_other_codec(path, manifest.get("codec"))
        files = {**shards, "index.npy": manifest["index"], **manifest.get("files", {})}
        return fault or self._compared(path.parent, files)

    def _model(self, path: Path) -> str | None:
        model = read_json(path)
        hashes = {name: model["carried"][name] for name in carried_files(path.parent, model)}
        fault = self._compared(path.parent, {"weights.safetensors": model["sha256"], **hashes})
        if fault is not None or path.parent.name != "train":
            return fault
        if fault := _of_other_inputs(path.parent.parent, model):
            return fault
        warn_about_previews(path.parent / "previews" / model["fingerprint"], self._compared)
        return self._model(path.parent / "raw" / "model.json") if model["train"]["keep_raw"] else None

    def _detector(self, path: Path) -> str | None:
        detector = read_json(path)
        fault = of_other_data(detector["data"], [path.parent.parent / "crops/manifest.json"])
        return fault or self._compared(path.parent, {"detector.safetensors": detector["sha256"]})

    def _reference(self, path: Path) -> str | None:
        crops = [path.parent.parent.parent / "crops/manifest.json"]
        return of_other_data(read_json(path)["splits"]["train"]["data"], crops) or self._described(path)

    def _described(self, path: Path) -> str | None:
        return self._compared(path.parent, read_json(path).get("files", {}))

    def _samples(self, path: Path) -> str | None:
        """Check samples; those in the folder of an experiment must belong to its weights."""
        made_with = read_json(path).get("weights_sha256")
        fault = of_other_weights(path.parent.parent, made_with) if path.parent.name == "samples" else None
        return fault or self._described(path)

    def _metrics(self, path: Path) -> str | None:
        judged = read_json(path).get("protocol", {}).get("weights", {}).get("sha256")
        return of_other_weights(path.parent, judged) or self._described(path)

    def _folder(self, path: Path) -> str | None:
        described = {f"{path.name}/{name}": sha256 for name, sha256 in read_checksums(path).items()}
        return self._compared(path.parent, described)

    def _tracked(self, path: Path) -> str | None:
        """Check the record of sent runs: a store in a file must contain every run that was sent, and its files; a
        server is not checked."""
        tracked = read_json(path)
        runs = tracked["runs"]
        if not self._store.startswith("sqlite:///"):
            return None
        store = Path(self._store.removeprefix("sqlite:///"))
        if not store.is_file():
            return f"{store} is not there"
        try:
            with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
                uris = dict(database.execute("SELECT run_uuid, artifact_uri FROM runs"))
        except sqlite3.OperationalError as error:
            return None if "locked" in str(error) else f"{store}: {error}"  # being written by another process
        except sqlite3.Error as error:
            return f"{store}: {error}"
        if missing := [run["run_id"] for run in runs if run["run_id"] not in uris]:
            return f"{store} lacks {len(missing):,} of its {len(runs):,} runs"
        emptied = [run for run in runs if run["files"] and not _is_there(uris[run["run_id"]])]
        if emptied:
            return f"the files of {len(emptied):,} of its {len(runs):,} runs are not there"
        listings = [store.parent / path for path in tracked.get("sent", ())]
        faults = (self._compared(path.parent, read_json(path)["files"]) for path in listings)
        return next((f"of what MLflow shows, {fault}" for fault in faults if fault), None)

    def _compared(self, folder: Path, files: Mapping[str, str]) -> str | None:
        """Describe the fault of files that should have the recorded sha256."""
        present = {name: sha256 for name, sha256 in files.items() if (folder / name).exists()}
        absent = [(name, sha256) for name, sha256 in files.items() if name not in present]
        missing = [name for name, sha256 in absent if not is_mirrored(folder / name, sha256)]
        sizes, passed_over = unread(folder, present), dict[str, int]()
        for name, size in sorted(sizes.items(), key=lambda item: item[1]):
            if size <= self._may_hash:
                self._may_hash -= size
            else:
                passed_over[name] = size
        if passed_over:
            print(
                f"note: {sum(passed_over.values()) / 1e9:,.1f} GB in {folder} were not looked through since they came "
                f"here. The stages that read them do that, and the next starts.",
                file=sys.stderr,
            )
        looked_at = {name: sha256 for name, sha256 in present.items() if name not in passed_over}
        wrong = missing or damaged(folder, looked_at)
        if not wrong:
            return None
        fault = "is missing" if missing else "is not what was written"
        return f"{wrong[0]} {fault}" + (f", like {len(wrong) - 1:,} other files" if wrong[1:] else "")


def _page(path: Path) -> str | None:
    return None if is_whole_page(path) else "it is not what was written"


def of_other_weights(experiment: Path, sha256: str | None) -> str | None:
    """Describe the fault of a result whose weights are not those that the experiment in a folder uses."""
    try:
        folder = used_weights(experiment)
        used = read_json(folder / "model.json")["sha256"]
    except (ValueError, OSError, KeyError, TypeError):  # reported for that file itself
        return None
    return None if sha256 in (None, used) else f"it is of other weights than those in {folder}"


def of_other_data(made_from: str | None, manifests: Sequence[Path]) -> str | None:
    """Describe the fault of a result that was made from other data than manifests describe. made_from: the digest that
    the result records; None for results of versions that record none. manifests: of the set, and of those joined to it.
    """
    try:
        digests = [manifest_digest(read_json(path)) for path in manifests]
    except (ValueError, OSError, TypeError):  # reported for the manifest itself
        return None
    if not digests:
        return None
    whole = reduce(lambda digest_so_far, other: digest([digest_so_far, other]), digests)
    return None if made_from in (None, whole) else f"it was made from other data than those in {manifests[0].parent}"


def _of_other_inputs(experiment: Path, model: Mapping[str, Any]) -> str | None:
    """Describe the fault of weights that were trained on other data, or started from other weights, than those of the
    experiment's plan. model: what describes the weights."""
    try:
        plan = read_plan(plan_file(experiment.parent, experiment.name))
    except (ValueError, OSError):
        return None
    files = Files(str(experiment.parent), Plans({plan.experiment: plan}))
    job = {"experiment": plan.experiment}
    data = [Path(path) for path in (files.training_data(job), *files.inputs("pairs")["pairs"](job))]
    if fault := of_other_data(model.get("data", {}).get("digest"), data):
        return fault
    if plan.start_experiment is None or "started_from" not in model:
        return None
    start = experiment.parent / plan.start_experiment
    is_other = of_other_weights(start, model["started_from"])
    return f"it started from other weights than those in {used_weights(start)}" if is_other else None


def _of_other_codec(manifest: Path, codec: Mapping[str, Any] | None) -> str | None:
    """Describe the fault of latents or tokens that were encoded with other weights than the codec of their
    configuration has now. codec: what the manifest tells of the codec."""
    try:
        config = manifest.parent.parent / "config" / f"encode-{manifest.parent.name}.yaml"
        experiment = from_text(config.read_text(encoding="utf-8"))["codec"]["experiment"]
        folder = manifest.parents[3] / experiment / "train"
        used = read_json(folder / "model.json")["sha256"]
    except (ValueError, OSError, KeyError, TypeError):  # a codec that no experiment trains, or that is reported itself
        return None
    made_with = codec["sha256"] if codec is not None else used
    return None if made_with == used else f"it was encoded with other weights than those in {folder}"


def _is_there(artifacts: str) -> bool:
    """Return True if the folder of a run's files exists, or if their location is not a folder."""
    place = urlsplit(artifacts)
    return place.scheme not in ("", "file") or Path(unquote(place.path)).is_dir()
