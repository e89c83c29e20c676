"""Passwords and other secrets reach only the servers they are meant for."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import webdataset

from image_diffusion.core.config.base import load, parse, to_yaml
from image_diffusion.core.config.yaml12 import in_line
from image_diffusion.core.files import store
from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.process.command import run
from image_diffusion.core.process.secrets import (
    STORE,
    for_shell,
    hidden,
    store_named,
    variable_of,
    without_credentials,
    without_password,
)
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.changes import refresh
from image_diffusion.data.sources.tars import TarStream
from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.stages import crop, datasheet, track, train
from image_diffusion.tools import configure
from image_diffusion.workflow.jobs.live_tracking import Following

STORES = {
    "postgresql+psycopg2://me:s3cr3t@db:5432/mlflow": "postgresql+psycopg2://db:5432/mlflow",
    "postgresql://db/mlflow?password=s3cr3t": "postgresql://db/mlflow",
    "http://me:s3cr3t@host:5000": "http://host:5000",
    "sqlite:///mlflow.db": "sqlite:///mlflow.db",
    "sqlite:////data/mlflow.db": "sqlite:////data/mlflow.db",
}


@pytest.mark.parametrize(("uri", "expected"), STORES.items())
def test_displayed_store_uri_has_no_password(uri: str, expected: str) -> None:
    assert without_password(uri) == expected


def test_stores_are_distinguished_without_their_passwords() -> None:
    names = {uri: variable_of(uri) for uri in STORES}
    assert len(set(names.values())) == len(names)
    assert variable_of("http://me:other@host:5000") == names["http://me:s3cr3t@host:5000"]


def test_errors_show_no_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_missing_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE, raising=False)
    with pytest.raises(ValueError, match="No MLflow store is named. Set MLFLOW_TRACKING_URI, or use --store."):
        store_named(None)
    monkeypatch.setenv(STORE, "sqlite:///other.db")
    assert store_named(None) == "sqlite:///other.db"


def test_tracking_process_gets_the_password_only_by_environment() -> None:
    following = Following({"every_s": 5, "uri": "http://me:s3cr3t@host", "project": "p"}, Path("src"), "results", ["a"])
    assert "s3cr3t" not in " ".join(following._command())
    assert following._environment()[STORE] == "http://me:s3cr3t@host"


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a server that refuses every request, and the Authorization headers it received."""
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
def test_password_reaches_the_server_by_uri_and_by_variables(
    way: str, asked: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from image_diffusion.tracking.connection import Connection, TrackingError

    address, found = asked
    uri = f"http://me:s3cr3t@{address}"
    if way == "in MLflow's variables":
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t")
        uri = f"http://{address}"
    with pytest.raises(TrackingError, match=f"MLflow at http://{address} could not store the history") as caught:
        Connection(uri, "p")
    assert "s3cr3t" not in str(caught.value)
    assert found[0] == "Basic " + base64.b64encode(b"me:s3cr3t").decode()


URLS = {
    "https://bob:S3CRETPASS@host/a.tar?sig=S3CRETSIG#part": "https://host/a.tar#part",
    "pipe:curl 'https://host/a.tar?X=S3CRETSIG' | cat": "pipe:curl 'https://host/a.tar' | cat",
    "http://S3CRETPASS@host:80/@scope/a.tar": "http://host:80/@scope/a.tar",
    "fetched s3://bucket/a@b.tar, then http://h/?a=S3CRETSIG": "fetched s3://bucket/a@b.tar, then http://h/",
    "what? a@b.c: no URL": "what? a@b.c: no URL",
}


@pytest.mark.parametrize(("text", "expected"), URLS.items())
def test_a_url_is_shown_without_user_and_query(text: str, expected: str) -> None:
    assert without_credentials(text) == expected == hidden(text)


PLANTED = (
    "http://bob:S3CRETPASS@127.0.0.1:1/a.tar",
    "https://S3CRETPASS@host/a.tar",
    "s3://key:S3CRETPASS@bucket/a.tar",
    "pipe:curl https://bob:S3CRETPASS@host/a.tar",
    "https://host/a.tar?X-Amz-Date=1&X-Amz-Signature=S3CRETSIG",
    "https://account.blob.core.windows.net/a.tar?sv=2025&sig=S3CRETSIG",
)
KEYS = [
    "experiment",
    "data.name",
    "data.source.path",
    "data.source.urls",
    "codec.weights",
    "train.init_from",
    "sample.prompts",
    "evaluate.against",
    "misspelt",
]


@pytest.mark.parametrize("url", PLANTED)
@pytest.mark.parametrize("key", KEYS)
def test_secrets_in_configurations_are_rejected(key: str, url: str, tmp_path: Path) -> None:
    data: Any = [url] if key in ("data.source.urls", "sample.prompts") else url
    for name in reversed(key.split(".")):
        data = {name: data}
    (tmp_path / "x.yaml").write_text(to_yaml(data))
    (tmp_path / "empty.yaml").write_text("{}")
    changed = partial(load, DataConfig, changes=[f"{key}={in_line(url)}"])
    for read, name in ((load_experiment, "x"), (partial(load, DataConfig), "x"), (changed, "empty")):
        with pytest.raises(ValueError, match=rf"{key} has a URL with a (user|query)") as error:
            read(tmp_path / f"{name}.yaml")
        told = str(error.value)
        assert "S3CRET" not in told and "\n" not in told and ("~/.netrc" in told or "environment variable" in told)


@pytest.mark.parametrize("query", ["a=1", "download", "${SIG}&a=1", "a=$SIG", "${SIG}x"])
def test_query_of_a_stream_url_must_come_from_the_environment(query: str) -> None:
    for url in (f"https://host/{{0..3}}.tar?{query}", f'pipe:curl "https://host/a.tar?{query}"'):
        with pytest.raises(ValueError, match=r"write \?\$\{NAME\} in its place"):
            parse(TarStream, {"urls": [url]}, "x.yaml")
    assert parse(TarStream, {"urls": ["https://host/a.tar?${SIG}", "https://h/b.tar?a=${A}&b=${B}"]}, "x.yaml")


def test_url_is_quoted_for_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIG", "a=1&b='$(x)' \"")
    command = f"printf %s {for_shell('https://h/$x`y`;{a}?${SIG}')}"
    assert subprocess.check_output(["sh", "-c", command], text=True) == "https://h/$x`y`;{a}?a=1&b='$(x)' \""
    assert "a=1" not in command
    with pytest.raises(ValueError, match="the environment variable NOT_THERE is not set"):
        for_shell("https://h/?${NOT_THERE}")


def test_errors_on_remote_shards_show_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_WAITS_S", ())
    for url in ("http://bob:S3CRETPASS@127.0.0.1:1/set", "s3x://key:S3CRETPASS@bucket/set"):
        with pytest.raises(ValueError, match=r"set/manifest\.json cannot be fetched") as error:
            open_shards(url, cache=tmp_path)
        assert "S3CRET" not in str(error.value)


class Guarded:
    """A web server for a folder that requires user, password and signature. refused: number of 401 responses."""

    def __init__(self, folder: Path) -> None:
        outer, self.refused = self, 0
        expected = "Basic " + base64.b64encode(b"bob:S3CRETPASS").decode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if self.headers["Authorization"] != expected or query != "X-Amz-Signature=S3CRETSIG":
                    outer.refused += 1
                    self.send_response(401)
                    self.end_headers()
                    return
                data = (folder / path.strip("/")).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


EXPERIMENT = """
data:
  name: streamed
  resolution: 4
  num_shards: 1
  validation_fraction: 0.2
  source: {{type: tar_stream, classes: 2, urls: ["http://127.0.0.1:{port}/a.tar?${{SIGNATURE}}"]}}
system: {{type: dit, network: {{patch: 2, width: 8, depth: 1, num_heads: 1}}}}
train: {{steps: 1, global_batch: 2, grid_every_steps: null}}
"""


def test_outputs_of_an_experiment_contain_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for number in range(10):
            pixels = bytes([number * 20] * 48)
            writer.write({"__key__": f"{number}", "ppm": b"P6 4 4 255\n" + pixels, "cls": str(number % 2).encode()})
    guarded = Guarded(tmp_path)
    (home := tmp_path / "home").mkdir()
    (home / ".netrc").write_text("machine 127.0.0.1 login bob password S3CRETPASS\n")
    (home / ".netrc").chmod(0o600)
    for name, value in {"HOME": str(home), "SIGNATURE": "X-Amz-Signature=S3CRETSIG", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    (project := tmp_path / "project").mkdir()
    monkeypatch.chdir(project)
    (project / "x.yaml").write_text(EXPERIMENT.format(port=guarded.server.server_port))

    def command(module: Any, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        module.main()

    results = project / "results"
    command(configure, "--experiments=x.yaml", f"--results={results}")
    plan = read_json(results / "x/config/plan.json")
    folder = results / "datasets" / plan["dataset"]
    refresh(parse(Source, plan["source"], "x"), folder / "source.json")
    crops, journal = folder / "config/crop.yaml", folder / "journal"
    shards = folder / "crops"
    command(
        crop, f"--config={crops}", f"--source={folder / 'source.json'}", f"--output={shards / 'manifest.json'}",
        f"--journal={journal / 'crop'}",
    )  # fmt: skip
    command(
        datasheet, f"--config={crops}", f"--data={shards / 'manifest.json'}",
        f"--output={folder / 'datasheet/datasheet.json'}", f"--journal={journal / 'datasheet'}",
    )  # fmt: skip
    own = results / "x"
    command(
        train, f"--config={own / 'config/train.yaml'}", f"--data={shards / 'manifest.json'}",
        f"--output={own / 'train/weights.safetensors'}", f"--journal={own / 'journal/train'}",
    )  # fmt: skip
    monkeypatch.setenv(STORE, f"sqlite:///{project / 'mlflow.db'}")
    command(track, "--project=p", f"--experiment={results / 'x'}", f"--dataset={folder}", "--best-metric=fid")
    assert read_json(shards / "manifest.json")["num_samples"] == 10 and not guarded.refused

    monkeypatch.setenv("SIGNATURE", "X-Amz-Signature=S3CRETSIG&wrong=1")
    monkeypatch.setattr(store, "_WAITS_S", ())
    with pytest.raises(SystemExit):
        run(partial(command, crop, f"--config={crops}", f"--output={project / 'again/manifest.json'}"))
    told = capfd.readouterr()
    assert "a.tar cannot be fetched" in told.err
    left = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    assert (project / "mlflow.db") in left and len(left) > 15
    found = [str(path) for path, data in left.items() if b"S3CRET" in data]
    assert not found and "S3CRET" not in told.out + told.err
    guarded.server.shutdown()
    guarded.server.server_close()
