"""The runs of an MLflow store. Sending is idempotent: sending again adds nothing, even after interruptions.

MLflow 3.17 does not guarantee this. Points are rows keyed by (metric, time, step, value), so sending them again is
harmless but slow (1.7 ms a point, against 0.04 ms to read it): the points of a run are read once. For the rest, this
module ensures it: a run has a key and is searched for first, the names of pictures are derived from their content, and
files are compared before they are sent.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from PIL import Image as PillowImage

from image_diffusion.core.journal.reader import Image, Point
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.tracking.connection import (
    EMPTY_VIEW,
    KEY,
    NOTE,
    VIEW,
    Connection,
    remove_damaged,
    view_with_metric,
)
from image_diffusion.tracking.plan import TRACE, DataSet
from image_diffusion.tracking.run_summary import Headline

T = TypeVar("T")
_Identity = tuple[str, int, int, str, str | None]  # of a point

_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 1000, 100, 100  # in one batch
_MAX_PARAM_CHARS, _MAX_TAG_CHARS, _MAX_KEY_CHARS = 6000, 8000, 250
_DIGEST_CHARS = 32  # of a data set's sha256: MLflow takes no more than 36
_MAX_COMPARED = 100  # maximum number of runs to compare a headline with
GROUP, HEADLINE = f"{TRACE}compared", f"{TRACE}headline"
"""Tags for the group of comparable runs, and for the headline as JSON: metric, value, interval."""
_MAX_PICTURE = 1024  # pixels: MLflow's own thumbnails of 256 are too small for a grid


class Runs:
    """The runs of a connection's experiment. Every method raises TrackingError if the store does not respond."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._client = connection, connection.client
        self._naming_errors, self._write = connection.naming_errors, connection.write
        self._sent: dict[str, tuple[int, set[_Identity]]] = {}  # superseded points then; points of the run
        self._files: dict[str, set[str]] = {}  # by run: names of the files that this module sent
        self._shown: set[str] = set()  # metrics with a column in the view of all runs
        self._fetched: dict[str, Run] = {}  # runs as found by `run`, with the tags set since

    def run(self, key: str, name: str, start_time: int, tags: Mapping[str, str]) -> str:
        """Return the id of the run with this key, creating it if missing. start_time: milliseconds since 1970.

        Call this first: the methods below do not send again what the run contained at this time.
        """

        def create() -> None:
            self._client.create_run(self._connection.experiment_id, start_time, {**tags, KEY: key}, name)

        def delete(run: Run) -> None:
            self._client.delete_run(run.info.run_id)

        with self._naming_errors():
            present = self._connection.get_or_create(
                lambda: self._runs(key), create, delete, lambda run: str(run.info.run_id)
            )
            run_id = str(present.info.run_id)
            self._fetched[run_id] = self._client.get_run(run_id)
            return run_id

    def remove_damaged(self, run_id: str) -> list[str]:
        """Remove the files of a run that changed after sending, so that they are sent again. Returns their names."""
        artifacts = self._connection.artifacts(self._fetched[run_id].info.artifact_uri)
        return remove_damaged(artifacts) if artifacts is not None else []

    def note_sent(self, run_id: str, wrong: Sequence[str]) -> None:
        """Record the files that were sent. wrong: result of `remove_damaged`."""
        artifacts = self._connection.artifacts(self._fetched[run_id].info.artifact_uri)
        if artifacts is not None and self._files.get(run_id):
            self._connection.note_sent(artifacts, self._files[run_id], wrong)

    def send_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set the tags that have changed. An empty value is set only if it replaces another value."""
        with self._naming_errors():
            present = self._fetched[run_id].data.tags
            cut = {_name(key): _cut(value, _MAX_TAG_CHARS) for key, value in tags.items()}
            changed = [RunTag(key, value) for key, value in cut.items() if present.get(key, "") != value]
            for batch in _batches(changed, _MAX_TAGS):
                self._write(self._client.log_batch, run_id, tags=batch, synchronous=True)
                present.update({tag.key: tag.value for tag in batch})

    def send_note(self, run_id: str, text: str) -> None:
        """Set the note at the top of a run's page, unless a user has edited it."""
        text = _cut(text, _MAX_TAG_CHARS)
        present = self._fetched[run_id].data.tags
        note, ours = present.get(NOTE), present.get(f"{TRACE}card")
        if note is None or ours == hashlib.sha256(note.encode()).hexdigest():
            self.send_tags(run_id, {NOTE: text, f"{TRACE}card": hashlib.sha256(text.encode()).hexdigest()})

    def send_view(self, metric: str) -> None:
        """Add a metric of `evaluate` to the view of all runs."""
        if metric in self._shown:
            return
        with self._naming_errors():
            tags = self._client.get_experiment(self._connection.experiment_id).tags
            view = view_with_metric(tags.get(VIEW, EMPTY_VIEW), metric)
            if view is not None:
                self._write(self._client.set_experiment_tag, self._connection.experiment_id, VIEW, view)
        self._shown.add(metric)

    def headlines(self, group: str, leave_out: str) -> list[tuple[str, Headline]]:
        """Return the names and headlines of the runs of a group, except one run, from their tags."""
        with self._naming_errors():
            runs = self._client.search_runs(
                [self._connection.experiment_id], f"tags.`{GROUP}` = '{group}'", max_results=_MAX_COMPARED
            )
        headlines = []
        for run in runs:
            if run.info.run_id != leave_out and (text := run.data.tags.get(HEADLINE)):
                metric, value, interval = json.loads(text)
                between = (interval[0], interval[1]) if interval else None
                headlines.append((str(run.info.run_name), Headline(metric, value, between)))
        return headlines

    def send_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Set parameters that are not set yet. MLflow never changes a parameter."""
        with self._naming_errors():
            present = self._fetched[run_id].data.params
            cut = {_name(key): _cut(_text(value), _MAX_PARAM_CHARS) for key, value in params.items()}
            missing = [Param(key, value) for key, value in cut.items() if key not in present]
            for batch in _batches(missing, _MAX_PARAMS):
                self._write(self._client.log_batch, run_id, params=batch, synchronous=True)

    def send_points(
        self,
        run_id: str,
        points: Sequence[Point],
        superseded: Sequence[Point] = (),
        model_id: str | None = None,
        dataset: tuple[str, str] | None = None,
    ) -> None:
        """Send metrics, each (key, step) once.

        superseded: points that failed attempts wrote at the same or later steps. MLflow cannot remove those that were
        already sent, so the new point of the same key and step is left out. model_id, dataset: the model and the data
        (name, digest) that the metrics belong to.
        """
        with self._naming_errors():
            sent = self._sent_to(run_id, len(superseded))
            dead = {(point.key, point.step) for point in superseded if _identity(point) in sent}
            about, digest = dataset or (None, "")
            shown = digest[:_DIGEST_CHARS] or None
            batch: list[tuple[_Identity, Metric]] = []
            for point in points:
                identity = _identity(point, model_id)
                if identity not in sent and (point.key, point.step) not in dead:
                    metric = Metric(
                        _name(point.key), point.value, point.time, point.step, model_id, about, shown, run_id
                    )
                    batch.append((identity, metric))
            for part in _batches(batch, _MAX_METRICS):
                metrics = [metric for _, metric in part]
                self._write(self._client.log_batch, run_id, metrics=metrics, synchronous=True)
                sent.update(identity for identity, _ in part)

    def send_images(self, run_id: str, images: Sequence[Image]) -> None:
        """Send pictures, each (key, step) once, named as MLflow's user interface expects them."""
        if not images:
            return
        with self._naming_errors():
            present = self._sizes(run_id, "images")
            for image in images:
                plain = re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", image.key)
                plain = plain if plain == image.key else _with_digest(plain, image.key)
                stem = plain.replace("/", "~") + f"+step+{image.step}+timestamp+"
                unique = uuid.uuid5(uuid.NAMESPACE_OID, f"{image.key}/{image.step}/{image.time}")
                name = f"{stem}{image.time}+{unique}"
                pair = f"{name}.png", f"{name}+compressed.webp"
                self._files.setdefault(run_id, set()).update(f"images/{file_name}" for file_name in pair)
                others = [other for other in present if other.startswith(stem) and not other.startswith(name)]
                sent = present.get(f"{name}.png") if pair[1] in present else None
                if others or (sent is not None and sent == (_size(image.path) or sent)):
                    continue
                if fault := image.fault:
                    log_line_once(f"warning: {image.path} {fault} and is not sent.")
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    small = Path(folder) / f"{name}+compressed.webp"
                    with PillowImage.open(image.path) as picture:
                        thumbnail = picture.convert("RGB")
                    thumbnail.thumbnail((_MAX_PICTURE, _MAX_PICTURE))
                    thumbnail.save(small, quality=90)
                    self._upload(run_id, small, "images")
                    full = Path(folder) / f"{name}.png"  # sent last, so that both are complete if it is
                    full.symlink_to(image.path.resolve())
                    self._upload(run_id, full, "images")
            self.send_tags(run_id, {"mlflow.loggedImages": "True"})

    def send_file(self, run_id: str, path: Path, name: str, sha256: str) -> None:
        """Send a file under a name such as "plots/loss.png", unless the run has it already with the same content."""
        self._files.setdefault(run_id, set()).add(name)
        with self._naming_errors():
            folder, _, base = name.rpartition("/")
            tag = f"{TRACE}sha256/{name}"
            sent_sha256 = self._fetched[run_id].data.tags.get(_name(tag))
            if sent_sha256 == sha256 and self._sizes(run_id, folder).get(base) == path.stat().st_size:
                return
            with tempfile.TemporaryDirectory() as temporary:
                link = Path(temporary) / base
                link.symlink_to(path.resolve())
                self._upload(run_id, link, folder)
            self.send_tags(run_id, {tag: sha256})

    def send_dataset(self, run_id: str, used: DataSet, context: str) -> None:
        """Record which data a run used. MLflow stores a prefix of the digest."""
        source, profile = json.dumps({"uri": str(used.folder)}), json.dumps(dict(used.profile))
        with self._naming_errors():
            data = Dataset(used.name, used.digest[:_DIGEST_CHARS], "local", source, None, profile)
            inputs = self._fetched[run_id].inputs.dataset_inputs
            if any((item.dataset.name, item.dataset.digest) == (data.name, data.digest) for item in inputs):
                return
            entry = DatasetInput(data, [InputTag("mlflow.data.context", context)])
            self._write(self._client.log_inputs, run_id, datasets=[entry])

    def send_end(self, run_id: str, status: str, end_time: int) -> None:
        """Close a run: FINISHED, FAILED or KILLED; end_time in milliseconds since 1970."""
        with self._naming_errors():
            info = self._fetched[run_id].info
            if (info.status, info.end_time) != (status, end_time):
                self._write(self._client.set_terminated, run_id, status, end_time)

    def _runs(self, key: str) -> list[Run]:
        return list(
            self._client.search_runs([self._connection.experiment_id], f"tags.`{KEY}` = '{key}'", max_results=100)
        )

    def _sent_to(self, run_id: str, superseded: int) -> set[_Identity]:
        """Return the points that a run has. superseded: number of superseded points; if it has grown, the points are
        read again, since another process may have sent points before they were superseded.
        """
        before, sent = self._sent.get(run_id, (-1, set()))
        if superseded > before:
            for key in self._fetched[run_id].data.metrics:
                sent |= {_identity(metric) for metric in self._client.get_metric_history(run_id, key)}
            self._sent[run_id] = (superseded, sent)
        return sent

    def _sizes(self, run_id: str, folder: str) -> dict[str, int]:
        """Return the names and sizes of a run's files in one folder."""
        entries = self._client.list_artifacts(run_id, folder or None)
        return {entry.path.rpartition("/")[2]: int(entry.file_size or 0) for entry in entries if not entry.is_dir}

    def _upload(self, run_id: str, path: Path, folder: str) -> None:
        self._client.log_artifact(run_id, str(path), folder or None)


def _identity(point: Point | Metric, model_id: str | None = None) -> _Identity:
    """Return the key of a point. model_id: of the logged model, which the store does not return for stored points."""
    time = point.time if isinstance(point, Point) else point.timestamp
    stored = min(max(point.value, -sys.float_info.max), sys.float_info.max) + 0.0  # MLflow has no infinity and no -0.0
    return _name(point.key), time, point.step, repr(stored), model_id


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None when it is missing."""
    return path.stat().st_size if path.is_file() else None


def _name(key: str) -> str:
    """Return a key that MLflow accepts: a normal path of at most 250 letters, digits and `_ - . / : space`. A key that
    differs from `key` ends in a digest of it, so that different keys stay different."""
    plain = re.sub(r"[^\w\-./: ]", "_", key)
    is_normal = posixpath.normpath(plain) == plain and plain != "." and not plain.startswith(("/", ".."))
    if is_normal and plain == key and len(key) <= _MAX_KEY_CHARS:
        return key
    return _with_digest(plain if is_normal else re.sub(r"^\.+|/", "_", plain), key)


def _with_digest(plain: str, key: str) -> str:
    """Return a changed key, cut to MLflow's length, that ends in a digest of the original `key`."""
    end = f"-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return plain[: _MAX_KEY_CHARS - len(end)] + end


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
