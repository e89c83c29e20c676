"""A password reaches MLflow and nobody else."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from image_diffusion.core.command import run
from image_diffusion.core.secrets import STORE, hidden, store_named, variable_of, without_password
from image_diffusion.tracking.connection import Connection, TrackingError
from image_diffusion.workflow.following import Following

STORES = {
    "postgresql+psycopg2://me:s3cr3t@db:5432/mlflow": "postgresql+psycopg2://db:5432/mlflow",
    "postgresql://db/mlflow?password=s3cr3t": "postgresql://db/mlflow",
    "http://me:s3cr3t@host:5000": "http://host:5000",
    "sqlite:///mlflow.db": "sqlite:///mlflow.db",
    "sqlite:////data/mlflow.db": "sqlite:////data/mlflow.db",
}


@pytest.mark.parametrize(("uri", "shown"), STORES.items())
def test_what_is_shown_of_a_store_has_no_password(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


def test_stores_are_told_apart_without_their_passwords() -> None:
    names = {uri: variable_of(uri) for uri in STORES}
    assert len(set(names.values())) == len(names)
    assert variable_of("http://me:other@host:5000") == names["http://me:s3cr3t@host:5000"]


def test_errors_and_tracebacks_show_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IMAGE_DIFFUSION_TRACEBACK", "1")
    monkeypatch.setenv(STORE, "")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    uri = store_named("http://me:s3cr3t%21@host")
    for error in (ValueError, OSError, KeyError):

        def fail(error: type[Exception] = error) -> None:
            raise error(f"{uri}, s3cr3t!, t0ken: no answer")

        with pytest.raises(SystemExit, match="1"):
            run(fail)
        told = capsys.readouterr().err
        assert "no answer" in told and "s3cr3t" not in told and "t0ken" not in told and "Traceback" in told
    assert hidden("nothing to hide") == "nothing to hide"


def test_a_store_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE, raising=False)
    with pytest.raises(ValueError, match="No MLflow store is named. Set MLFLOW_TRACKING_URI, or give --store."):
        store_named(None)
    monkeypatch.setenv(STORE, "sqlite:///other.db")
    assert store_named(None) == "sqlite:///other.db"


def test_the_follower_has_it_in_its_environment_alone() -> None:
    following = Following({"every_s": 5, "uri": "http://me:s3cr3t@host", "project": "p"}, Path("src"), "results", ["a"])
    assert "s3cr3t" not in " ".join(following._command())
    assert following._environment()[STORE] == "http://me:s3cr3t@host"


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a server that grants nothing, and who asked it."""
    found: list[str | None] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.append(self.headers["Authorization"])
            self.send_response(401)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", found
        server.shutdown()


@pytest.mark.parametrize("way", ["in the URI", "in MLflow's variables"])
def test_it_reaches_the_server_either_way(
    way: str, asked: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, found = asked
    uri = f"http://me:s3cr3t@{address}"
    if way == "in MLflow's variables":
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t")
        uri = f"http://{address}"
    with pytest.raises(TrackingError, match=f"MLflow at http://{address} did not take the history") as caught:
        Connection(uri, "p")
    assert "s3cr3t" not in str(caught.value)
    assert found[0] == "Basic " + base64.b64encode(b"me:s3cr3t").decode()
