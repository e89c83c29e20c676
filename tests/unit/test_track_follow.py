"""The MLflow follower: it watches journals and results, sends news once, and survives failures of the store."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import image_diffusion.__main__
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.journal.writer import Journal
from image_diffusion.stages import track
from image_diffusion.tracking.live import follow, send_in_subprocess
from image_diffusion.tracking.plan import Request, request_of, watched


class Store:
    """A store that records each send and fails a number of times first."""

    def __init__(self, failures: int, stop: threading.Event, enough: int) -> None:
        self.failures, self.sent, self._stop, self._enough = failures, [], stop, enough  # type: ignore[var-annotated]

    def send(self, requests: Sequence[Request], live: bool) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise OSError("MLflow at here could not store the history: it is down.")
        self.sent.append(live)
        if len(self.sent) == self._enough:
            self._stop.set()


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    with Journal.open(tmp_path / "demo" / "journal", "train") as journal:
        journal.metrics({"loss": 1.0}, step=1)
    return tmp_path / "demo"


def test_failing_store_is_reported_once(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    store = Store(3, stop, enough=1)
    follow(store.send, [Request(experiment)], 0.01, stop)
    assert store.sent == [True, False]  # live, then the final send
    assert capsys.readouterr().err.count("warning: MLflow at here could not store the history") == 1


def test_failure_of_the_final_send_is_an_error(experiment: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(OSError, match="it is down"):
        follow(Store(9, stop, 1).send, [Request(experiment)], 60, stop)


def test_follower_does_not_resend_what_track_sent(experiment: Path) -> None:
    request = Request(experiment)
    before = watched(request)
    assert before is not None
    with Journal.open(experiment / "journal", "sample"):
        pass
    assert watched(request) != before
    write_json(experiment / "tracked.json", {})
    os.utime(experiment / "tracked.json", (2e9, 2e9))
    assert watched(request) is None
    stop = threading.Event()
    stop.set()
    follow(lambda *_: pytest.fail("nothing is to be sent"), [request], 60, stop)


FOLLOWER = """
import sys, threading
from functools import partial
from pathlib import Path
from image_diffusion.tracking.live import follow, send_in_subprocess
from image_diffusion.tracking.plan import Request

def main():
    stop, sent = threading.Event(), []
    def send(requests, live):
        send_in_subprocess("sqlite:///mlflow.db", "p", requests, live)
        sent.append(live)
        stop.set()
    follow(send, [Request(Path("demo"))], 0.01, stop)
    print(sent, [name for name in ("mlflow", "pandas", "sqlalchemy", "torch") if name in sys.modules])

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_long_running_follower_never_imports_mlflow(experiment: Path) -> None:
    """Large packages are imported by a subprocess that ends after sending."""
    (experiment.parent / "follower.py").write_text(FOLLOWER)
    printed = subprocess.run(
        [sys.executable, "follower.py"], cwd=experiment.parent, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[True, False] []\n"
    with closing(sqlite3.connect(experiment.parent / "mlflow.db")) as database:
        assert database.execute("SELECT key, value FROM metrics").fetchall() == [("loss", 1.0)]


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_sender_counts_as_a_failing_store(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.tracking.live._send_and_report", _killed)
    with pytest.raises(OSError, match="The process that sends to MLflow was killed"):
        send_in_subprocess("sqlite:///mlflow.db", "p", [Request(experiment)], True)


def test_old_follow_command_runs_track_with_follow_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("image_diffusion.__main__.run", lambda main: ran.append((main.__module__, sys.argv[1:])))
    old = ["follow", "--results", "results", "--every", "5", "--project", "p", "--experiments", "one", "two"]
    monkeypatch.setattr("sys.argv", ["image-diffusion", *old])
    image_diffusion.__main__.main()
    gc.enable()
    words = ["--results", "results", "--every", "5", "--project", "p", "--follow", "one", "two"]
    assert ran == [("image_diffusion.stages.track", words)]
    assert capsys.readouterr().err == (
        "warning: the command follow is an option of track: track --follow EXPERIMENT …\n"
    )


def test_request_follows_from_the_plan(tmp_path: Path) -> None:
    plan = {"codec_experiment": "codec", "dataset": "digits-32", "headline": "inpipe_fd", "embeddings_experiment": None}
    write_json(tmp_path / "demo" / "config" / "plan.json", plan)
    assert request_of(tmp_path, "demo") == Request(
        tmp_path / "demo", [tmp_path / "datasets/digits-32"], tmp_path / "codec/train", "inpipe_fd"
    )
    write_json(tmp_path / "demo" / "config" / "plan.json", plan | {"embeddings_experiment": "prior"})
    assert request_of(tmp_path, "demo").embeddings == tmp_path / "prior"


class Sends:
    """A stand-in for the tracker that records its requests."""

    requests: ClassVar[list[Request]] = []

    def __init__(self, *_: object) -> None:
        pass

    def send(self, request: Request) -> dict[str, Any]:
        self.requests.append(request)
        return {"runs": [], "store": "s", "page": "p"}


def test_track_takes_defaults_from_the_plan(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = experiment.parent
    plan = {"codec_experiment": None, "dataset": "dots", "headline": "mine_fd", "embeddings_experiment": "prior"}
    write_json(experiment / "config" / "plan.json", plan)
    monkeypatch.setitem(sys.modules, "image_diffusion.tracking.tracker", SimpleNamespace(Tracker=Sends))
    words = ["track", "--store", "s", "--project", "p", "--experiment", str(experiment), "--largest-file-mb", "1"]
    for more in ([], ["--dataset", str(results / "other"), "--best-metric", "fid"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        track.main()
    planned = Request(experiment, [results / "datasets/dots"], None, "mine_fd", 2**20, results / "prior")
    assert Sends.requests == [planned, replace(planned, datasets=[results / "other"], best_metric="fid")]
