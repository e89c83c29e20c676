"""A connection to an MLflow store that is slow, breaks, or is written to by several at once.

Requests have bounds, a sqlite file is made whole or not at all and has one writer at a time on this machine, and what
is created is looked for first: twins (a request whose answer was lost is sent again by the client) are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from image_diffusion.core.exhausted import room_at
from image_diffusion.core.secrets import hidden, without_password
from image_diffusion.tracking import views

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
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # noqa: E402

for _logger in ("alembic", "mlflow", "urllib3"):  # what goes wrong is raised, and told once by the command
    logging.getLogger(_logger).setLevel(logging.CRITICAL)

T = TypeVar("T")

KEY = "image_diffusion.key"  # the tag that says which run, model or version this is
NOTE = "mlflow.note.content"  # the tag that MLflow shows as a description
_ABOUT = (
    "Trainings of image diffusion models. A run that is called like an experiment is its training: its page opens with "
    "what it is, how good it is and how to make it again; `sample` and `evaluate` are runs below it. Stages of a data "
    "set, such as `crop`, are runs of their own."
)
_LOCK_PATIENCE_S = 300.0
_REMOTE = ("mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3", "alembic")  # whose exceptions are the store's


class Connection:
    """One MLflow experiment of a store, created when missing.

    uri: any tracking URI: `sqlite:///mlflow.db`, `http://host:5000`, `postgresql+psycopg2://…`. Files of a sqlite
    store lie in `mlruns/` beside its database. client: MLflow's own; use it within `told`. experiment_id: the number
    the user interface shows the experiment under. lock: a file that writers on this machine hold in turn.
    """

    def __init__(self, uri: str, project: str) -> None:
        self._local = _sqlite_path(uri)
        if self._local is not None:
            self._local.parent.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._local}"
            self.lock = self._local.with_name(f"{self._local.name}.lock")
        else:
            name = hashlib.sha256(f"{os.getuid()} {uri}".encode()).hexdigest()[:16]
            self.lock = Path(tempfile.gettempdir()) / f"image-diffusion-{name}.lock"
        self.shown_uri = without_password(uri)
        mlflow.set_tracking_uri(uri)
        with self.told(), locked(self.lock):  # creating the tables is a race between processes
            self._patiently(lambda: self._open(uri, project))

    def _open(self, uri: str, project: str) -> None:
        if self._local is not None and not self._local.exists():
            create_database(self._local)
        self.client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.project, self.experiment_id = project, self._experiment_named(project)
        present = self.client.get_experiment(self.experiment_id).tags
        for tag, value in ((NOTE, _ABOUT), (views.TAG, views.EMPTY)):
            if tag not in present:
                self.client.set_experiment_tag(self.experiment_id, tag, value)

    def once(
        self,
        search: Callable[[], list[T]],
        create: Callable[[], None],
        delete: Callable[[T], None],
        order: Callable[[T], Any],
    ) -> T:
        """The one thing that `search` finds, created when missing. Twins can appear, when two machines create at once
        or when an answer is lost: the first in an order all agree on stays."""
        with locked(self.lock):
            found = search()
            if not found:
                create()
                found = search()
            first, *twins = sorted(found, key=order)
            for twin in twins:
                delete(twin)
            return first

    def write(self, call: Callable[..., object], *values: Any, **named: Any) -> None:
        """One write. A sqlite file takes one writer at a time: writers on this machine queue up by a file lock."""
        with locked(self.lock) if self._local is not None else nullcontext():
            self._patiently(lambda: call(*values, **named))

    def _patiently(self, call: Callable[[], object]) -> None:
        """A database that somebody else holds for longer than it is waited for (5 s, or MLflow's 20) is asked again."""
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
    def told(self) -> Iterator[None]:
        """What MLflow raises, as a TrackingError of one sentence that holds no password."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _REMOTE:
                raise
            raise TrackingError(self._sentence(error)) from error

    def _experiment_named(self, project: str) -> str:
        found = self.client.get_experiment_by_name(project)
        if found is None:
            location = None if self._local is None else (self._local.parent / "mlruns" / _folder(project)).as_uri()
            try:
                return str(self.client.create_experiment(project, location))
            except MlflowException as error:  # another machine did, or the answer to our first request was lost
                found = self.client.get_experiment_by_name(project)
                if found is None:
                    raise error
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"The MLflow experiment '{project}' was deleted. Restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or choose another project name."
            )
        return str(found.experiment_id)

    def _sentence(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = hidden(re.sub(r"://[^/\s@]*@", "://***@", lines[0]))
        told = f"MLflow at {self.shown_uri} did not take the history: {reason[:300]}"
        if self._local is not None and "disk is full" in reason:
            return f"{told}. {room_at(self._local)} Make room and run the same command again."
        if self._local is not None and re.search("not a database|malformed", reason):
            return f"{told}. Move {self._local} away and run the same command again: the journals fill a new one."
        return told


class TrackingError(OSError):
    """The store did not answer, or refused. Nothing is lost: everything is in the journals."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file. Waits; a process that dies lets go. Never delete the file: others may wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def create_database(path: Path) -> None:
    """An empty database, whole or absent: one that was half made by a killed process could never be opened again."""
    for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed here; the caller holds the lock
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{fresh}", (path.parent / "mlruns").as_uri()).engine.dispose()
        fresh.replace(path)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _folder(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
