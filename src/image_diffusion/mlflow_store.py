"""An MLflow store to which everything can be sent again: sending twice adds nothing, whatever happened in between.

MLflow 3.17 gives no such promise by itself. Points are rows keyed by (metric, time, step, value), so an exact replay
of them is harmless; everything else is made so here: what is created carries a key and is looked for first, twins
(a request whose answer was lost is sent again by the client) are found and removed, pictures have names that follow
from what they show, files are compared before they are sent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from image_diffusion.core.history import Image, Point

# Bounds for every request, where the user has set none: MLflow's own let one call take 20 minutes. Telemetry is off.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
for _variable, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_variable, _value)

warnings.filterwarnings("ignore", module=r"mlflow|pydantic")

import mlflow  # noqa: E402 - reads its environment when it is imported
from mlflow.entities import (  # noqa: E402
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # noqa: E402
from PIL import Image as PillowImage  # noqa: E402

for _logger in ("alembic", "mlflow", "urllib3"):  # what goes wrong is raised, and told once by the command
    logging.getLogger(_logger).setLevel(logging.CRITICAL)

T = TypeVar("T")

KEY = "image_diffusion.key"  # the tag that says which run, model or version this is
_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 1000, 100, 100  # in one batch
_MAX_PARAM_CHARS, _MAX_TAG_CHARS, _MAX_KEY_CHARS = 6000, 8000, 250
_MAX_PICTURE = 1024  # pixels: MLflow's own thumbnails of 256 are too small for a grid
_LOCK_PATIENCE_S = 300.0
_REMOTE = ("mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3", "alembic")  # whose exceptions are the store's


class Store:
    """One MLflow experiment, created when missing.

    uri: any tracking URI: `sqlite:///mlflow.db`, `http://host:5000`, `postgresql+psycopg2://…`. Files of a sqlite
    store lie in `mlruns/` beside its database. experiment_id: the number the user interface shows it under.
    Every method raises TrackingError when the store does not answer.
    """

    def __init__(self, uri: str, project: str) -> None:
        self._local = _sqlite_path(uri)
        if self._local is not None:
            self._local.parent.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._local}"
            self._lock = self._local.with_name(f"{self._local.name}.lock")
        else:
            name = hashlib.sha256(f"{os.getuid()} {uri}".encode()).hexdigest()[:16]
            self._lock = Path(tempfile.gettempdir()) / f"image-diffusion-{name}.lock"
        self.shown_uri = without_password(uri)
        self._sent: dict[str, set[tuple[str, int, int, str]]] = {}
        self._known: dict[str, Run] = {}  # runs as they were when `run` found them, and the tags set since
        self._taken_of: dict[str, tuple[int, set[tuple[str, int]]]] = {}
        mlflow.set_tracking_uri(uri)
        with self._told(), locked(self._lock):  # creating the tables is a race between processes
            if self._local is not None and not self._local.exists():
                _create_database(self._local)
            self._client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            self._project, self.experiment_id = project, self._experiment_named(project)

    def run(self, key: str, name: str, start_time: int, tags: Mapping[str, str]) -> str:
        """The id of the run with this key, created when missing. start_time: milliseconds since 1970.

        Ask for it first: the methods below leave out what the run held at this moment.
        """

        def create() -> None:
            self._client.create_run(self.experiment_id, start_time, {**tags, KEY: key}, name)

        def delete(run: Run) -> None:
            self._client.delete_run(run.info.run_id)

        with self._told():
            found = self._once(lambda: self._runs(key), create, delete, lambda run: str(run.info.run_id))
            run_id = str(found.info.run_id)
            self._known[run_id] = self._client.get_run(run_id)
            return run_id

    def send_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; those that are set already are not sent."""
        with self._told():
            present = self._known[run_id].data.tags
            wanted = {_name(key): _cut(value, _MAX_TAG_CHARS) for key, value in tags.items()}
            changed = [RunTag(key, value) for key, value in wanted.items() if present.get(key) != value]
            for batch in _batches(changed, _MAX_TAGS):
                self._write(self._client.log_batch, run_id, tags=batch, synchronous=True)
                present.update({tag.key: tag.value for tag in batch})

    def send_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Set parameters that are not set yet. MLflow never changes a parameter."""
        with self._told():
            present = self._known[run_id].data.params
            wanted = {_name(key): _cut(_text(value), _MAX_PARAM_CHARS) for key, value in params.items()}
            missing = [Param(key, value) for key, value in wanted.items() if key not in present]
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

        superseded: what dead attempts wrote at the same steps or beyond. Where one of them was sent while it was
        alive it stays, for MLflow cannot take it back, and the point of the same key and step is left out.
        model_id, dataset: the model and the data (name, digest) that the numbers are about.
        """
        with self._told():
            taken = self._taken(run_id, superseded)
            sent = self._sent.setdefault(run_id, set())
            names, digest = dataset or (None, None)
            batch: list[tuple[tuple[str, int, int, str], Metric]] = []
            for point in points:
                key = _name(point.key)
                identity = (key, point.time, point.step, repr(point.value))
                if identity not in sent and (key, point.step) not in taken:
                    metric = Metric(key, point.value, point.time, point.step, model_id, names, digest, run_id)
                    batch.append((identity, metric))
            for part in _batches(batch, _MAX_METRICS):
                metrics = [metric for _, metric in part]
                self._write(self._client.log_batch, run_id, metrics=metrics, synchronous=True)
                sent.update(identity for identity, _ in part)

    def send_images(self, run_id: str, images: Sequence[Image]) -> None:
        """Send pictures, each (key, step) once, named as MLflow's user interface expects them."""
        if not images:
            return
        with self._told():
            present = self._sizes(run_id, "images")
            for image in images:
                stem = (
                    re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", image.key).replace("/", "~") + f"+step+{image.step}+timestamp+"
                )
                unique = uuid.uuid5(uuid.NAMESPACE_OID, f"{image.key}/{image.step}/{image.time}")
                name = f"{stem}{image.time}+{unique}"
                others = [other for other in present if other.startswith(stem) and not other.startswith(name)]
                if others or present.get(f"{name}.png") == image.path.stat().st_size:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    small = Path(folder) / f"{name}+compressed.webp"
                    with PillowImage.open(image.path) as picture:
                        thumbnail = picture.convert("RGB")
                    thumbnail.thumbnail((_MAX_PICTURE, _MAX_PICTURE))
                    thumbnail.save(small, quality=90)
                    self._upload(run_id, small, "images")
                    whole = Path(folder) / f"{name}.png"  # last: when it is complete, both are
                    whole.symlink_to(image.path.resolve())
                    self._upload(run_id, whole, "images")
            self.send_tags(run_id, {"mlflow.loggedImages": "True"})

    def send_file(self, run_id: str, path: Path, name: str, sha256: str) -> None:
        """Send a file under a name such as "plots/loss.png", unless the run has it already with the same content."""
        with self._told():
            folder, _, base = name.rpartition("/")
            tag = f"sha256/{name}"
            known = self._known[run_id].data.tags.get(_name(tag))
            if known == sha256 and self._sizes(run_id, folder).get(base) == path.stat().st_size:
                return
            with tempfile.TemporaryDirectory() as temporary:
                link = Path(temporary) / base
                link.symlink_to(path.resolve())
                self._upload(run_id, link, folder)
            self.send_tags(run_id, {tag: sha256})

    def send_dataset(self, run_id: str, name: str, digest: str, source: str, context: str) -> None:
        """Note which data a run used. digest: sha256 in hexadecimal, of which MLflow keeps 32 characters."""
        with self._told():
            data = Dataset(name, digest[:32], "local", json.dumps({"uri": source}))
            inputs = self._known[run_id].inputs.dataset_inputs
            if any((each.dataset.name, each.dataset.digest) == (name, digest[:32]) for each in inputs):
                return
            entry = DatasetInput(data, [InputTag("mlflow.data.context", context)])
            self._write(self._client.log_inputs, run_id, datasets=[entry])

    def send_end(self, run_id: str, status: str, end_time: int) -> None:
        """Close a run: FINISHED, FAILED or KILLED; end_time in milliseconds since 1970."""
        with self._told():
            info = self._known[run_id].info
            if (info.status, info.end_time) != (status, end_time):
                self._write(self._client.set_terminated, run_id, status, end_time)

    def model(self, key: str, name: str, run_id: str, step: int, tags: Mapping[str, str]) -> str:
        """The id of the logged model with this key, made by a run at a step; created when missing. Its weights stay
        where they are."""

        def create() -> None:
            self._client.create_logged_model(self.experiment_id, name, run_id, {**tags, KEY: key}, {}, "diffusion")

        def search() -> list[Any]:
            return list(self._client.search_logged_models([self.experiment_id], f"tags.`{KEY}` = '{key}'"))

        with self._told():
            model = self._once(
                search, create, lambda twin: self._client.delete_logged_model(twin.model_id), lambda each: each.model_id
            )
            model_id = str(model.model_id)
            if model.status != LoggedModelStatus.READY:
                self._write(self._client.finalize_logged_model, model_id, LoggedModelStatus.READY)
            made = {output.model_id for output in self._known[run_id].outputs.model_outputs}
            if model_id not in made:
                self._write(self._client.log_outputs, run_id, [LoggedModelOutput(model_id, step)])
            return model_id

    def use_model(self, run_id: str, model_id: str) -> None:
        """Note that a run used a logged model."""
        with self._told():
            used = {each.model_id for each in self._known[run_id].inputs.model_inputs}
            if model_id not in used:
                self._write(self._client.log_inputs, run_id, models=[LoggedModelInput(model_id)])

    def register(self, model_id: str, run_id: str, tags: Mapping[str, str], score: float | None) -> None:
        """Make a logged model a version of the project's registered model, and give the alias `champion` to the
        version with the lowest score; a version without a score is never champion."""
        name = re.sub(r"[/:]", "_", self._project)
        score_tags = {} if score is None else {"score": repr(score)}

        def search() -> list[Any]:
            versions = self._client.search_model_versions(f"name = '{name}'")
            return [version for version in versions if version.tags.get(KEY) == model_id]

        def create() -> None:
            if not self._client.search_registered_models(f"name = '{name}'"):
                try:
                    self._client.create_registered_model(name)
                except MlflowException as error:  # somebody else did, or the answer to our first request was lost
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
            all_tags = {**tags, **score_tags, KEY: model_id}
            source = f"models:/{model_id}"
            self._client.create_model_version(name, source, run_id, all_tags, model_id=model_id, await_creation_for=0)

        def delete(twin: Any) -> None:
            self._client.delete_model_version(name, twin.version)

        with self._told():
            mine = self._once(search, create, delete, lambda each: int(each.version))
            for key, value in score_tags.items():
                if mine.tags.get(key) != value:
                    self._write(self._client.set_model_version_tag, name, mine.version, key, value)
            with locked(self._lock):
                versions = self._client.search_model_versions(f"name = '{name}'")
                scored = [(float(each.tags["score"]), int(each.version)) for each in versions if "score" in each.tags]
                if scored:
                    best = str(min(scored)[1])
                    aliases = self._client.get_registered_model(name).aliases
                    if str(aliases.get("champion")) != best:
                        self._client.set_registered_model_alias(name, "champion", best)

    def _experiment_named(self, project: str) -> str:
        found = self._client.get_experiment_by_name(project)
        if found is None:
            location = None if self._local is None else (self._local.parent / "mlruns" / _folder(project)).as_uri()
            try:
                return str(self._client.create_experiment(project, location))
            except MlflowException as error:  # another machine did, or the answer to our first request was lost
                found = self._client.get_experiment_by_name(project)
                if found is None:
                    raise error
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"The MLflow experiment '{project}' was deleted. Restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or choose another project name."
            )
        return str(found.experiment_id)

    def _runs(self, key: str) -> list[Run]:
        return list(self._client.search_runs([self.experiment_id], f"tags.`{KEY}` = '{key}'", max_results=100))

    def _once(
        self,
        search: Callable[[], list[T]],
        create: Callable[[], None],
        delete: Callable[[T], None],
        order: Callable[[T], Any],
    ) -> T:
        """The one thing that `search` finds, created when missing. Twins can appear, when two machines create at once
        or when an answer is lost: the first in an order all agree on stays."""
        with locked(self._lock):
            found = search()
            if not found:
                create()
                found = search()
            first, *twins = sorted(found, key=order)
            for twin in twins:
                delete(twin)
            return first

    def _taken(self, run_id: str, superseded: Sequence[Point]) -> set[tuple[str, int]]:
        """(key, step) of the superseded points that are in the store. What is superseded is never sent any more, so
        the answer changes only when more is."""
        count, taken = self._taken_of.get(run_id, (0, set()))
        if count != len(superseded):
            by_key: dict[str, list[Point]] = {}
            for point in superseded:
                by_key.setdefault(_name(point.key), []).append(point)
            for key, points in by_key.items():
                there = {(metric.step, metric.timestamp) for metric in self._client.get_metric_history(run_id, key)}
                taken |= {(key, point.step) for point in points if (point.step, point.time) in there}
            self._taken_of[run_id] = (len(superseded), taken)
        return taken

    def _sizes(self, run_id: str, folder: str) -> dict[str, int]:
        """Names and sizes of a run's files in one folder."""
        entries = self._client.list_artifacts(run_id, folder or None)
        return {entry.path.rpartition("/")[2]: int(entry.file_size or 0) for entry in entries if not entry.is_dir}

    def _upload(self, run_id: str, path: Path, folder: str) -> None:
        self._client.log_artifact(run_id, str(path), folder or None)

    def _write(self, call: Callable[..., object], *values: Any, **named: Any) -> None:
        """One write. A sqlite file takes one writer at a time: writers on this machine queue up by a file lock, and a
        database that somebody else holds longer than MLflow waits (20 s) is asked again."""
        give_up = time.monotonic() + _LOCK_PATIENCE_S
        with locked(self._lock) if self._local is not None else nullcontext():
            while True:
                try:
                    call(*values, **named)
                except MlflowException as error:
                    busy = self._local is not None and "database is locked" in str(error)
                    if not busy or time.monotonic() > give_up:
                        raise
                else:
                    return

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What MLflow raises, as a TrackingError of one sentence that holds no password."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _REMOTE:
                raise
            raise TrackingError(self._sentence(error)) from error

    def _sentence(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = re.sub(r"://[^/\s@]*@", "://***@", lines[0])
        return f"MLflow at {self.shown_uri} did not take the history: {reason[:300]}"


class TrackingError(OSError):
    """The store did not answer, or refused. Nothing is lost: everything is in the journals."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file. Waits; a process that dies lets go. Never delete the file: others may wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def without_password(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) if host != parts.netloc else uri


def _create_database(path: Path) -> None:
    """An empty database, whole or absent: one that was half made by a killed process could never be opened again."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{fresh}", (path.parent / "mlruns").as_uri()).engine.dispose()
        fresh.replace(path)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _folder(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _name(key: str) -> str:
    """A key as MLflow accepts it: at most 250 of letters, digits and `_ - . / : space`."""
    return re.sub(r"[^\w\-./: ]", "_", key)[:_MAX_KEY_CHARS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
