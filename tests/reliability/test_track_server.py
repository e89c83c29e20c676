"""Tracking loses and duplicates nothing with a proxy that breaks requests and a server that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from breaking import BreakingProxy, Server, free_port
from tracked import check_same, check_whole, contents, forked, status_of, track

from image_diffusion.tracking.live import follow, send
from image_diffusion.tracking.plan import FinalWeights, Request
from tiny_models import write_model

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_failing_server_loses_and_duplicates_nothing(finished: Path, server: Server, proxy: str) -> None:
    BreakingProxy.broken = 0.25
    rng, passes = random.Random(3), 0
    for passes in range(1, 200):
        child = forked(lambda: track(proxy, finished))
        if passes <= 5:
            time.sleep(rng.random())
            os.kill(child, signal.SIGKILL)
        if passes == 3:
            server.kill()
            server.start()
        if status_of(child) == 0:
            break
    BreakingProxy.broken = 0.0
    track(proxy, finished)  # without faults: the effects of lost answers are corrected
    assert passes > 5 and all(BreakingProxy.faults[name] for name in ("500", "503", "reset", "lost", "slow"))
    held = contents(server.database)
    check_whole(held, finished)
    track(proxy, finished)
    check_same(contents(server.database), held)


def test_lost_answers_create_no_duplicates(
    server: Server, proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from image_diffusion.tracking.connection import Connection
    from image_diffusion.tracking.models import Models
    from image_diffusion.tracking.runs import Runs

    BreakingProxy.broken = 0.0
    connection = Connection(proxy, "twins")
    runs, models = Runs(connection), Models(connection)
    lost = {"runs/create": 2, "logged-models": 1, "model-versions/create": 2}
    hand_on = BreakingProxy.answer

    def answer(self: BreakingProxy, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        ending = next((name for name in lost if self.command == "POST" and self.path.endswith(name)), None)
        if ending is not None and lost[ending] > 0:
            lost[ending] -= 1
            self.cut()
        else:
            hand_on(self, status, headers, content)

    monkeypatch.setattr(BreakingProxy, "answer", answer)
    run_id = runs.run("key", "twin", 1000, {})
    write_model(tmp_path, 1)
    files = {name: tmp_path / "train" / name for name in ("model.json", "weights.safetensors")}
    model_id = models.log(FinalWeights("model", "twin", run_id, 1, 1000, {}, files))
    models.register("twins", model_id, run_id, {}, 1.0, "A model.", "A version.")
    assert lost == {"runs/create": 0, "logged-models": 0, "model-versions/create": 0}
    client = connection.client
    assert [run.info.run_id for run in client.search_runs([connection.experiment_id])] == [run_id]
    assert [model.model_id for model in client.search_logged_models([connection.experiment_id])] == [model_id]
    assert len(client.search_model_versions("name = 'twins'")) == 1


def test_unreachable_server_is_one_line_error_and_history_is_kept(finished: Path, tmp_path: Path) -> None:
    uri = f"http://someone:s3cr3t@127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "image_diffusion", "track", "--store", uri, "--project", "faults"]
    command += ["--experiment", str(finished), "--output", str(tmp_path / "tracked.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: MLflow at http://127.0.0.1:") and "s3cr3t" not in line
    assert not (tmp_path / "tracked.json").exists()
    database = tmp_path / "mlflow.db"
    track(f"sqlite:///{database}", finished)
    check_whole(contents(database), finished)


def test_follower_survives_failing_server_and_sends_everything_later(
    finished: Path, server: Server, proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from image_diffusion.tracking.connection import Connection

    BreakingProxy.broken = 1.0
    stop = threading.Event()
    thread = threading.Thread(target=lambda: follow(partial(send, proxy, "live"), [Request(finished)], 0.05, stop))
    thread.start()
    until = time.monotonic() + 60
    while "warning: MLflow at" not in capsys.readouterr().err:
        assert time.monotonic() < until, "the follower did not warn"
        time.sleep(0.05)
    BreakingProxy.broken = 0.0
    stop.set()
    thread.join()
    client = Connection(proxy, "live").client
    held = client.search_runs([client.get_experiment_by_name("live").experiment_id])
    assert [run.info.status for run in held] == ["FINISHED"] * 3


def test_files_that_a_server_refuses_as_too_large_withhold_nothing_else(
    finished: Path, server: Server, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from image_diffusion.tracking.connection import Connection

    monkeypatch.setattr(BreakingProxy, "broken", 0.0)
    monkeypatch.setattr(BreakingProxy, "largest", 6000)
    with pytest.raises(OSError, match=r"413 .*limits uploads: raise the limit \(nginx: client_max_body_size\)\.$"):
        send(proxy, "limited", [Request(finished), Request(finished)], False)
    client = Connection(proxy, "limited").client
    runs = client.search_runs([client.get_experiment_by_name("limited").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert {run.data.metrics.get("fid", run.data.metrics.get("evaluate/fid")) for run in runs} == {12.5, None}
    (training,) = (run.info.run_id for run in runs if run.info.run_name == finished.name)
    assert "train/model.json" in [entry.path for entry in client.list_artifacts(training, "train")]
    monkeypatch.setattr(BreakingProxy, "largest", 1 << 30)
    send(proxy, "limited", [Request(finished)], False)
    assert len(client.list_artifacts(training, "images")) == 6


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_an_address_that_is_no_mlflow_server_is_one_clear_error(
    content: bytes, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from image_diffusion.tracking.connection import Connection, TrackingError

    for method in ("GET", "POST"):
        monkeypatch.setattr(BreakingProxy, f"do_{method}", lambda self: self.answer(200, [], content))
    with pytest.raises(TrackingError) as caught:
        Connection(proxy, "p")
    assert str(caught.value) == f"{proxy} does not answer as an MLflow server does. Check tracking.uri."
