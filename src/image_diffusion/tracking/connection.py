"""A connection to an MLflow store that is slow, breaks, or is written to by several at once, and the files that were
sent to a store on this machine.

Requests have time limits; a sqlite file is created atomically and has one writer at a time on this machine; objects are
looked up before creation, and duplicates (after a lost response, the client repeats the request) are removed.

`sent.json`, next to the folder of artifacts of a run or model, has the sha256 of each file that this package sent; the
store does not show it. Damaged files are removed before anything is sent, so that they are sent again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.files.checksums import damaged, describe
from image_diffusion.core.process.errors import log_line_once, room_at
from image_diffusion.core.process.secrets import hidden, without_password

LISTING = "sent.json"


def folder_of(uri: str) -> Path | None:
    """Return the folder that an artifact URI names; None for a URI that is not a folder of this machine."""
    place = urlsplit(uri)
    return Path(unquote(place.path)) if place.scheme in ("", "file") else None


def remove_damaged(artifacts: Path) -> list[str]:
    """Remove files that have changed since they were sent. Returns the paths of these and of missing files, relative to
    the folder above `artifacts`; empty without a record."""
    folder = artifacts.parent
    wrong = damaged(folder, _listed(folder))
    for name in wrong:
        (folder / name).unlink(missing_ok=True)
    return wrong


def note_sent(artifacts: Path, names: Iterable[str], wrong: Iterable[str]) -> Path:
    """Record the sha256 of the sent files, and report which damaged ones were sent again. Returns the listing.

    names: paths relative to `artifacts`. wrong: result of `remove_damaged`.
    """
    folder = artifacts.parent
    files = [path for path in (artifacts / name for name in sorted(set(names))) if path.is_file()]
    for path in (folder / name for name in wrong):
        outcome = "has been sent again" if path.is_file() else "cannot be sent again, as its source is missing"
        log_line_once(f"warning: {path} was damaged or missing and {outcome}.")
    hashes = describe(folder, files)
    if hashes != _listed(folder):
        write_json(folder / LISTING, {"files": hashes})
    return folder / LISTING


def _listed(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file that was sent; empty without a record or with a damaged one."""
    try:
        return dict(read_json(folder / LISTING)["files"])
    except (ValueError, KeyError, TypeError):
        return {}


# Time limits of requests, unless the user sets them: with MLflow's own, a call may take 20 minutes. Telemetry is off.
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
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # noqa: E402

for _logger in ("alembic", "mlflow", "urllib3"):  # errors are raised, and the command reports them once
    logging.getLogger(_logger).setLevel(logging.CRITICAL)

T = TypeVar("T")
Part = Callable[[], AbstractContextManager[None]]
"""Makes the context of a part of a task, see `deferring_too_large`."""

KEY = "image_diffusion.key"  # tag with the key of a run, model or version
NOTE = "mlflow.note.content"  # tag that MLflow shows as the description
VIEW = "mlflow.sharedViewState.trainings"
"""Tag of an experiment that holds, as JSON, a view of its runs with the columns that matter: MLflow's own has no column
for a metric. (MLflow 3.17; the user interface reads `selectedColumns`, and fills in the rest.)"""
LINK = "?viewStateShareKey=trainings&workflowType=machine_learning"
"""Suffix of the address of an experiment's runs. Without the last part MLflow opens its pages for language models."""
_LAST = "metrics.`validation/loss`"
EMPTY_VIEW = json.dumps({"selectedColumns": ["tags.`data`", "params.`system.type`", "params.`train.steps`", _LAST]})
"""View before any metric of `evaluate` is known."""
_ABOUT = (
    "Trainings of image diffusion models. A run that is called like an experiment is its training: its page opens with "
    "what it is, how good it is and how to make it again; `sample` and `evaluate` are runs below it. Stages of a data "
    "set, such as `crop`, are runs of their own."
)
_LOCK_PATIENCE_S = 300.0
_ARTIFACT_COLUMNS = (  # every column of MLflow's tables that holds locations of artifacts
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),
)
_REMOTE = ("mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3", "alembic")  # packages of its exceptions


class Connection:
    """One MLflow experiment of a store, created when missing.

    uri: any tracking URI: `sqlite:///mlflow.db`, `http://host:5000`, `postgresql+psycopg2://…`. Files of a sqlite store
    are in `mlruns/`, next to the database. client: MLflow's client; use it within `naming_errors`. experiment_id: of
    the MLflow experiment. lock: file lock for writers on this machine. listings: listings of the files that were sent
    to a sqlite store, see `remove_damaged`.
    """

    def __init__(self, uri: str, project: str) -> None:
        self._local = _sqlite_path(uri)
        self.listings = set[Path]()
        if self._local is not None:
            self._local.parent.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._local}"
            self.lock = self._local.with_name(f"{self._local.name}.lock")
        else:
            name = hashlib.sha256(f"{os.getuid()} {uri}".encode()).hexdigest()[:16]
            self.lock = Path(tempfile.gettempdir()) / f"image-diffusion-{name}.lock"
        self.shown_uri = without_password(uri)
        mlflow.set_tracking_uri(uri)
        with self.naming_errors(), locked(self.lock):  # processes may create the tables concurrently
            self._patiently(lambda: self._open(uri, project))

    def _open(self, uri: str, project: str) -> None:
        if self._local is not None and not self._local.exists():
            create_database(self._local)
        self.client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.project, self.experiment_id = project, self._experiment_named(project)
        present = self.client.get_experiment(self.experiment_id).tags
        for tag, value in ((NOTE, _ABOUT), (VIEW, EMPTY_VIEW)):
            if tag not in present:
                self.client.set_experiment_tag(self.experiment_id, tag, value)

    def get_or_create(
        self,
        search: Callable[[], list[T]],
        create: Callable[[], None],
        delete: Callable[[T], None],
        order: Callable[[T], Any],
    ) -> T:
        """Return the object that `search` finds, creating it if missing. Of duplicates, which arise if two machines
        create it at once or a response is lost, all but the first by `order` are deleted."""
        with locked(self.lock):
            matches = search()
            if not matches:
                create()
                matches = search()
            first, *twins = sorted(matches, key=order)
            for twin in twins:
                delete(twin)
            return first

    def artifacts(self, uri: str) -> Path | None:
        """Return the folder of artifacts of a sqlite store; None for other stores, which manage their own files."""
        return folder_of(uri) if self._local is not None else None

    def note_sent(self, artifacts: Path, names: Iterable[str], wrong: Iterable[str]) -> None:
        """Record which files were sent to a folder: see the function `note_sent`."""
        self.listings.add(note_sent(artifacts, names, wrong))

    @property
    def shown_listings(self) -> list[str]:
        """Return the paths of the listings, relative to the folder of the store, sorted."""
        root = self._local.parent if self._local is not None else Path()
        return sorted(os.path.relpath(path, root) for path in self.listings)

    def write(self, call: Callable[..., object], *values: Any, **keywords: Any) -> None:
        """Write once. A sqlite file takes one writer at a time: a file lock serializes the writers on this machine."""
        with locked(self.lock) if self._local is not None else nullcontext():
            self._patiently(lambda: call(*values, **keywords))

    def _patiently(self, call: Callable[[], object]) -> None:
        """Repeat a call while the database is locked for longer than sqlite (5 s) or MLflow (20 s) waits."""
        give_up = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                call()
            except Exception as error:
                busy = self._local is not None and "database is locked" in str(error)
                if not busy or time.monotonic() > give_up:
                    raise
            else:
                return

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Raise MLflow's errors as a TrackingError with one sentence that contains no password."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _REMOTE:
                raise
            if _is_too_large(error):
                raise UploadTooLargeError(self._sentence(error)) from error
            raise TrackingError(self._sentence(error)) from error

    def _experiment_named(self, project: str) -> str:
        experiment = self.client.get_experiment_by_name(project)
        if experiment is None:
            location = None if self._local is None else _location(self._local, project)
            try:
                return str(self.client.create_experiment(project, location))
            except MlflowException as error:  # another machine created it, or the response to a first request was lost
                experiment = self.client.get_experiment_by_name(project)
                if experiment is None:
                    raise error
        if not experiment.experiment_id:  # of a response without an experiment
            raise TrackingError(f"{self.shown_uri} does not answer as an MLflow server does. Check tracking.uri.")
        if experiment.lifecycle_stage != "active":
            raise ValueError(
                f"The MLflow experiment '{project}' was deleted. Restore it with `mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}`, or choose another project name."
            )
        if self._local is not None:
            adopt_files(self._local, experiment.artifact_location, _location(self._local, project))
        return str(experiment.experiment_id)

    def _sentence(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = hidden(re.sub(r"://[^/\s@]*@", "://***@", lines[0]))
        message = f"MLflow at {self.shown_uri} could not store the history: {reason[:300]}"
        if _is_too_large(error):
            advice = "The server, or a proxy before it, limits uploads: raise the limit (nginx: client_max_body_size)."
            return f"{message.partition('. Response text:')[0]}. {advice}"
        if self._local is not None and "disk is full" in reason:
            return f"{message}. {room_at(self._local)} Free some space and run the same command again."
        if self._local is not None and re.search("not a database|malformed", reason):
            return f"{message}. Move {self._local} away and run the same command again, which makes a new one."
        return message


class TrackingError(OSError):
    """The store did not respond, or refused a request. No data is lost: everything is in the journals."""


class UploadTooLargeError(TrackingError):
    """The server, or a proxy in front of it, refused a file as too large (HTTP 413)."""


@contextmanager
def deferring_too_large() -> Iterator[Part]:
    """Yield the context of the parts of a task. An UploadTooLargeError ends its part only; the first one is raised
    after the whole task.
    """
    refused: list[UploadTooLargeError] = []

    @contextmanager
    def part() -> Iterator[None]:
        try:
            yield
        except UploadTooLargeError as error:
            refused.append(error)

    yield part
    if refused:
        raise refused[0]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a file lock and hold it; the system releases it. Never delete the file: others may wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def create_database(path: Path) -> None:
    """Create an empty database atomically, since a partial one left by a killed process could never be opened."""
    for leftover in path.parent.glob(f".{path.name}.*"):  # of a killed process, since the caller holds the lock
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{fresh}", (path.parent / "mlruns").as_uri()).engine.dispose()
        fresh.replace(path)


def adopt_files(database: Path, stored: str, location: str) -> None:
    """Make a copied or moved sqlite store name the files beside it: MLflow stores absolute locations, and a copy would
    replace the files of the original. MLflow cannot change a location, so its tables are rewritten, in one transaction.

    stored: the location of the project's experiment in the store. location: the one that a new store would have, a URI
    that ends in `/mlruns/<project>`. If `stored` is another URI of a local folder with this ending, all locations in
    its `mlruns/` change, and no others: not those on S3, in other folders or of a server with its own artifact root.
    """
    folder = location.rpartition("/")[2]
    if stored == location or not (stored.startswith("file:") and stored.endswith(f"/mlruns/{folder}")):
        return
    old, new = stored.removesuffix(folder), location.removesuffix(folder)
    prefixes = [(old, new), (f"{folder_of(old)}/", f"{folder_of(new)}/")]  # MLflow also stores plain paths
    with closing(sqlite3.connect(database)) as connection, connection:
        for (table, column), (old, new) in product(_ARTIFACT_COLUMNS, prefixes):
            connection.execute(
                f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                f"WHERE substr({column}, 1, length(:old)) = :old",
                {"old": old, "new": new},
            )


def view_with_metric(view: str, metric: str) -> str | None:
    """Return the view with an added column for a metric of `evaluate`; None if it has one, or if a user saved a view of
    another form. view: the current tag.
    """
    column = f"metrics.`evaluate/{metric}`"
    try:
        columns = list(json.loads(view)["selectedColumns"])
    except (ValueError, KeyError, TypeError):
        return None
    if column in columns:
        return None
    place = columns.index(_LAST) if _LAST in columns else len(columns)
    return json.dumps({"selectedColumns": [*columns[:place], column, *columns[place:]]})


def _is_too_large(error: Exception) -> bool:
    response = getattr(error, "response", None)  # of requests
    return getattr(response, "status_code", None) == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _location(database: Path, project: str) -> str:
    return (database.parent / "mlruns" / re.sub(r"[^\w.-]", "_", project)).as_uri()
