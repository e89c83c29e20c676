"""Makes the modules of this folder importable, and starts all trainings of the tests by one server."""

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attempts import Attempts

QUICK = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


@pytest.fixture(scope="session")
def attempts() -> Iterator[Attempts]:
    """Server that starts trainings and ends them at chosen instants."""
    with Attempts() as server:
        yield server


@pytest.fixture(scope="session")
def kills() -> int:
    """Total number of SIGKILLs of trainings."""
    return int(os.environ.get("IMAGE_DIFFUSION_KILLS", "120"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make MLflow's retries give up soon."""
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment to send, with every kind of record."""
    from tracked import make_experiment

    return make_experiment(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new, empty database."""
    from image_diffusion.tracking import connection

    database = tmp_path_factory.mktemp("empty") / "mlflow.db"
    connection.create_database(database)
    return database


@pytest.fixture(scope="session")
def sent(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A database to which the experiment was sent once, without interruption."""
    from tracked import track

    database = tmp_path_factory.mktemp("store with space") / "mlflow.db"
    return database, track(f"sqlite:///{database}", finished)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real MLflow server."""
    from breaking import Server

    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def proxy(server: Any) -> Iterator[str]:
    """The address of a proxy in front of that server, which breaks requests."""
    from breaking import BreakingProxy

    BreakingProxy.target = server.port
    front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BreakingProxy)
    thread = threading.Thread(target=front.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{front.server_address[1]}"
    front.shutdown()
    front.server_close()
