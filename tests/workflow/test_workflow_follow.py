"""MLflow shows the metrics of stages while they run; the process that sends them ends with Snakemake."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from projects import ROOT, Project

pytestmark = pytest.mark.slow

POINTS = """
SELECT count(*) FROM metrics JOIN runs USING (run_uuid) JOIN tags USING (run_uuid)
WHERE tags.key = 'stage' AND tags.value = 'train' AND metrics.key = 'train/loss' AND runs.status = ?
"""


@pytest.fixture
def fresh(fresh: Project) -> Project:
    """Project without warm processes, as for a user."""
    return replace(fresh, cold=True)


@pytest.fixture
def finished(finished: Project) -> Project:
    """Project without warm processes, as for a user."""
    return replace(finished, cold=True)


def points(project: Project, status: str) -> int:
    """Return the number of losses in MLflow of trainings with this status."""
    database = project / "mlflow.db"
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return int(connection.execute(POINTS, (status,)).fetchone()[0])


def followers(project: Project) -> list[int]:
    """Return the process ids of `track --follow` for this project."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = (process / "cwd").resolve() == project.folder.resolve()
            if mine and {b"track", b"--follow"} <= set((process / "cmdline").read_bytes().split(b"\0")):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def wait_until(what: str, condition: object, running: subprocess.Popen[bytes] | None = None) -> None:
    assert callable(condition)
    until = time.monotonic() + 240
    while not condition():
        assert running is None or running.poll() is None, f"ended before {what}"
        assert time.monotonic() < until, what
        time.sleep(0.1)


@contextmanager
def user_interface(project: Project) -> Iterator[Callable[[], list[str]]]:
    """Run `make ui` for a project; yield a function that returns its runs as JSON texts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["sh", str(ROOT / "workflow/scripts/ui.sh"), "mlflow.db", str(port)]
    with (project / "ui.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=project.folder, stdout=log, stderr=log, start_new_session=True)

    def runs() -> list[str]:
        address = f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/search"
        request = urllib.request.Request(
            address, json.dumps({"experiment_ids": ["1"]}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return [json.dumps(run) for run in json.load(answer).get("runs", [])]
        except OSError:  # the server does not listen yet
            return []

    try:
        yield runs
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.long
def test_curves_reach_mlflow_during_training_and_no_process_is_left(fresh: Project) -> None:
    """`make ui` shows a running training without stopping it, then Snakemake is killed. In a second training only the
    follower is killed; its metrics are sent at the end."""
    settings = fresh / "config/config.yaml"
    settings.write_text(settings.read_text().replace("every_s:", "every_s: 1"))
    fresh.edit(lambda experiment: experiment["train"].update(steps=100_000))
    with subprocess.Popen(
        fresh.command(), cwd=fresh.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        wait_until("a loss is shown", lambda: points(fresh, "RUNNING") > 0, running)
        assert len(followers(fresh)) == 1
        with user_interface(fresh) as runs:
            wait_until("the page shows the run", lambda: any("train/loss" in run for run in runs()), running)
            shown = points(fresh, "RUNNING")
            wait_until("another loss is shown", lambda: points(fresh, "RUNNING") > shown, running)
        os.killpg(running.pid, signal.SIGKILL)
    wait_until("the follower ends", lambda: not followers(fresh))

    fresh.edit(lambda experiment: experiment["train"].update(steps=200, seed=1))
    command = [*fresh.command(), "results/micro/train/weights.safetensors"]
    with subprocess.Popen(command, cwd=fresh.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        wait_until("there is a follower", lambda: followers(fresh), running)
        os.kill(followers(fresh)[0], signal.SIGKILL)
        printed = running.communicate()[0].decode()
    assert running.returncode == 0, printed
    assert "warning: MLflow" not in printed
    assert not followers(fresh)
    said = (fresh / "logs/follow.log").read_text()
    assert points(fresh, "FINISHED") > 0 and points(fresh, "RUNNING") == 0, said


def test_unreachable_store_changes_no_result(fresh: Project, made: Project) -> None:
    settings = fresh / "config/config.yaml"
    text = settings.read_text().replace("every_s:", "every_s: 1")
    settings.write_text(text.replace("sqlite:///mlflow.db", "http://127.0.0.1:9"))
    said = replace(fresh, cold=False).run("results/micro/train/weights.safetensors")
    assert "warning: MLflow did not take everything yet" in said
    assert not followers(fresh)
    for each in ("weights.safetensors", "model.json"):
        path = f"results/micro/train/{each}"
        assert (fresh / path).read_bytes() == (made / path).read_bytes(), "followed and sent, it is the same"


def test_a_password_is_in_no_command_line_and_in_no_file(finished: Project) -> None:
    """The store refuses every request, so that every error message that could contain the password is written."""
    seen: list[bytes] = []
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = finished / "config/config.yaml"
        text = settings.read_text().replace("sqlite:///mlflow.db", f"http://me:s3cr3t@127.0.0.1:{server.server_port}")
        settings.write_text(text.replace("every_s:", "every_s: 1"))
        command = [*finished.command(), "--printshellcmds", "--verbose", "results/micro/tracked.json"]
        with (finished / "told.txt").open("wb") as output:
            running = subprocess.Popen(command, cwd=finished.folder, stdout=output, stderr=output)
            while running.poll() is None:
                seen += command_lines()
                time.sleep(0.05)
        server.shutdown()
    told = (finished / "told.txt").read_text()
    assert running.returncode == 1 and "could not store the history" in told
    assert "Basic " + b64encode(b"me:s3cr3t").decode() in Refuses.asked
    assert any(b"image_diffusion\0track" in line for line in seen)
    assert "s3cr3t" not in told and not any(b"s3cr3t" in line for line in seen)
    files = [path for path in finished.folder.rglob("*") if path.is_file() and path != settings]
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []


class Refuses(BaseHTTPRequestHandler):
    """MLflow server that answers every request with 401 and records the Authorization headers."""

    asked: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.asked.add(self.headers["Authorization"])
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def command_lines() -> list[bytes]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found.append((process / "cmdline").read_bytes())
    return found
