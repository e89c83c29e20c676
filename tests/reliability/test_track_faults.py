"""Tracking loses nothing and doubles nothing: replays, SIGKILL at any instant, a store that breaks, many at once.

What MLflow should hold is worked out here from what was logged; what it holds is read from its database and folders.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from image_diffusion import mlflow_store
from image_diffusion.core.files import write_json
from image_diffusion.core.history import read_journal
from image_diffusion.core.journal import Journal
from image_diffusion.mlflow_store import Store, without_password
from image_diffusion.track import follow, track

STEPS = 360
QUICK = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


def make_experiment(folder: Path, steps: int = STEPS) -> Path:
    """An experiment as the stages leave it: three stages, two attempts of the first, pictures, weights, a plot."""
    rng = np.random.default_rng(0)
    picture = folder / "picture.png"
    folder.mkdir(parents=True)
    Image.fromarray(rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(picture)
    for resume, first, last in ((None, 1, steps // 2 + 50), (steps // 2, steps // 2 + 1, steps)):
        with Journal.open(folder / "journal", "train", resume_step=resume, tags={"fingerprint": "f"}) as journal:
            journal.params({"train": {"steps": steps, "lr": 1e-4}, **{f"p{i}": i for i in range(120)}})
            for step in range(first, last + 1):
                journal.metrics({"loss": 1 / step, "odd": float("nan")}, step=step, examples_seen=64 * step)
                if step % (steps // 3) == 0:
                    journal.image("samples/ema", picture, step=step)
            journal.artifact(picture, "plots/picture.png")
    (folder / "train").mkdir()
    (folder / "train" / "weights.safetensors").write_bytes(b"weights")
    described = {"format": 1, "system": {"type": "dit"}, "step": steps, "sha256": "0" * 64}
    write_json(folder / "train" / "model.json", described)
    for stage in ("sample", "evaluate"):
        with Journal.open(folder / "journal", stage) as journal:
            journal.params({"seed": 0})
            journal.metrics({"fid": 12.5} if stage == "evaluate" else {"speed/images_per_s": 3.0}, step=steps)
    return folder


def options(store: str, experiment: Path, **changed: Any) -> argparse.Namespace:
    plain = {"dataset": [], "output": None, "largest_file_mb": 64.0, "champion_metric": "fid", "follow": None}
    return argparse.Namespace(store=store, experiment=experiment, **{"project": "faults", **plain, **changed})


def contents(database: Path) -> dict[str, Any]:
    """Everything active in an MLflow database and its folder of files, ids and times of sending left out."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return connection.execute(query).fetchall()

        active = "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active'"
        names = dict(rows("SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active'"))
        metrics = rows(
            f"SELECT run_uuid, key, timestamp, step, value, is_nan FROM metrics WHERE run_uuid IN ({active})"
        )
        params = rows(f"SELECT run_uuid, key, value FROM params WHERE run_uuid IN ({active})")
        tags = rows(f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN ({active})")
        files = [path for path in (database.parent / "mlruns").rglob("*") if path.is_file()]
        return {
            "runs": sorted(
                rows("SELECT name, status, start_time, end_time FROM runs WHERE lifecycle_stage = 'active'")
            ),
            "metrics": Counter((names[run], *row) for run, *row in metrics),
            "params": Counter((names[run], *row) for run, *row in params),
            "tags": {(names[run], key, names.get(value, value)) for run, key, value in tags},
            "files": Counter(
                (
                    names[run],
                    path.relative_to(database.parent).as_posix().partition("/artifacts/")[2],
                    path.read_bytes(),
                )
                for path in files
                for run in names
                if run in path.parts
            ),
            "models": rows("SELECT count(*) FROM logged_models WHERE lifecycle_stage = 'active'"),
            "versions": rows("SELECT count(*) FROM model_versions WHERE current_stage != 'Deleted_Internal'"),
            "aliases": rows("SELECT name, alias FROM registered_model_aliases"),
        }


def expected_points(experiment: Path) -> dict[str, Counter[tuple[str, int]]]:
    """(metric, step) of every run, from the journals as they were written, without the reader under test."""
    steps = range(1, STEPS + 1)
    train = Counter({(key, step): 1 for key in ("loss", "odd", "examples_seen") for step in steps})
    return {
        experiment.name: train + Counter({("evaluate/fid", STEPS): 1}),
        f"evaluate {experiment.name}": Counter({("fid", STEPS): 1}),
        f"sample {experiment.name}": Counter({("speed/images_per_s", STEPS): 1}),
    }


def check_whole(held: dict[str, Any], experiment: Path) -> None:
    by_run: dict[str, Counter[tuple[str, int]]] = {}
    for (run, key, _, step, _, _), count in held["metrics"].items():
        by_run.setdefault(run, Counter())[key, step] += count
    assert by_run == expected_points(experiment)
    assert [run[:2] for run in held["runs"]] == [
        (experiment.name, "FINISHED"),
        (f"evaluate {experiment.name}", "FINISHED"),
        (f"sample {experiment.name}", "FINISHED"),
    ]
    names = [name for _, name, _ in held["files"].elements()]
    pictures = [name for name in names if name.endswith(".png") and name.startswith("images/samples~ema+step+")]
    assert sorted(int(name.split("+")[2]) for name in pictures) == [STEPS // 3, 2 * STEPS // 3, STEPS]
    assert len([name for name in names if name.endswith("+compressed.webp")]) == 3
    assert {"plots/picture.png", "train/weights.safetensors", "train/model.json"} <= set(names)
    assert len(names) == len(set(names)) == 9
    assert (held["models"], held["versions"], held["aliases"]) == ([(1,)], [(1,)], [("faults", "champion")])
    assert ("sample " + experiment.name, "mlflow.parentRunId", experiment.name) in held["tags"]


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a child process, which has everything imported already; returns its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_experiment(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with nothing in it yet."""
    database = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow_store._create_database(database)
    return database


@pytest.fixture(scope="module")
def sent(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A database to which the experiment was sent once, in one go."""
    database = tmp_path_factory.mktemp("store with space") / "mlflow.db"
    tracked = track(options(f"sqlite:///{database}", finished))
    return database, tracked


def test_everything_arrives_once_and_a_replay_adds_nothing(finished: Path, sent: tuple[Path, dict[str, Any]]) -> None:
    database, tracked = sent
    held = contents(database)
    check_whole(held, finished)
    assert track(options(f"sqlite:///{database}", finished)) == tracked
    assert contents(database) == held


def test_killed_at_any_instant_it_is_made_whole_by_the_next_call(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    """SIGKILL from the creation of the database to the last tag; three stores, until each one was completed."""
    whole = contents(sent[0])
    rng, kills = random.Random(0), 0
    for trial in range(3):
        database = tmp_path / str(trial) / "mlflow.db"
        if trial > 0:  # creating it takes longest: once is enough
            database.parent.mkdir()
            shutil.copyfile(empty, database)
        given_s = 0.1
        while True:
            child = forked(lambda: track(options(f"sqlite:///{database}", finished)))  # noqa: B023
            time.sleep(given_s * rng.random())
            os.kill(child, signal.SIGKILL)
            if status_of(child) == 0:
                break
            kills += 1
            given_s *= 1.3  # at first it does not get far; in the end it gets through
        assert contents(database) == whole
    assert kills >= 20


def test_eight_at_once_on_a_store_that_does_not_exist(tmp_path: Path) -> None:
    experiments = [make_experiment(tmp_path / f"demo-{i}", steps=60) for i in range(8)]
    database = tmp_path / "mlflow.db"
    children = [forked(lambda e=each: track(options(f"sqlite:///{database}", e))) for each in experiments]
    assert [status_of(child) for child in children] == [0] * 8
    held = contents(database)
    assert len(held["runs"]) == 24
    counts = Counter(run for run, *_ in held["metrics"].elements())
    assert {counts[each.name] for each in experiments} == {3 * 60 + 1}
    assert (held["models"], held["versions"], held["aliases"]) == ([(8,)], [(8,)], [("faults", "champion")])


def test_two_at_once_on_one_experiment(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)
    children = [forked(lambda: track(options(f"sqlite:///{database}", finished))) for _ in range(2)]
    assert [status_of(child) for child in children] == [0, 0]
    assert contents(database) == contents(sent[0])


def train_until_killed(folder: Path, pause_s: float) -> None:
    """A stage in miniature: a checkpoint every ten steps, and the same numbers again after each restart."""
    checkpoint = folder / "checkpoint"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with Journal.open(folder / "journal", "train", resume_step=start, tags={"fingerprint": "f"}) as journal:
        for step in range(start + 1, 201):
            journal.metrics({"loss": 1 / step}, step=step)
            time.sleep(pause_s)
            if step % 10 == 0:
                checkpoint.write_text(str(step))


def test_live_while_training_is_killed_and_killed_itself(tmp_path: Path, empty: Path) -> None:
    """A dead attempt's points that were shown while it lived stay; the same steps of the next one are not added."""
    rng, folder = random.Random(1), tmp_path / "live"
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)

    def follow_for_ever() -> None:
        follow(options(f"sqlite:///{database}", folder, follow=0.02), threading.Event())

    follower, done, given_s = forked(follow_for_ever), False, 0.4
    try:
        while not done:
            trainer = forked(lambda: train_until_killed(folder, 0.005))
            time.sleep(given_s * rng.random())
            os.kill(trainer, signal.SIGKILL)
            done = status_of(trainer) == 0
            given_s *= 1.15  # a slow machine gets through as well
            if rng.random() < 0.5:
                os.kill(follower, signal.SIGKILL)
                status_of(follower)
                follower = forked(follow_for_ever)
    finally:
        os.kill(follower, signal.SIGKILL)
        status_of(follower)
    track(options(f"sqlite:///{database}", folder))
    history = read_journal(folder / "journal" / "train")
    assert history is not None
    held = [(key, step) for _, key, _, step, *_ in contents(database)["metrics"].elements()]
    assert sorted(held) == [("loss", step) for step in range(1, 201)]
    assert len(history.starts) > 2 and len(history.superseded) > 0


class BreakingProxy(http.server.BaseHTTPRequestHandler):
    """Hands requests on to a server, and breaks some: 500, 503, a reset, an answer lost after the work, a delay."""

    protocol_version = "HTTP/1.1"
    target = 0
    broken = 0.0
    delay_s = 0.3
    rng = random.Random(2)
    faults: ClassVar[Counter[str]] = Counter()

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        names = ("500", "503", "reset", "lost", "slow")
        fault = self.rng.choice(names) if self.rng.random() < self.broken else "none"
        self.faults[fault] += 1
        if fault in ("500", "503"):
            self.answer(int(fault), [], b"broken")
        elif fault == "reset":
            self.cut()
        else:
            skipped = ("transfer-encoding", "content-length", "connection")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
            connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if fault == "lost":
                self.cut()
                return
            if fault == "slow":
                time.sleep(self.delay_s)
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
            self.answer(answer.status, kept, content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real MLflow server on loopback, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.database, self.port = folder / "mlflow.db", free_port()
        self.folder = folder

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.folder / "mlruns"), "--workers", "1", "--port", str(self.port)]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            command, env=environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
        )
        until = time.monotonic() + 240
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[str]:
    BreakingProxy.target = server.port
    front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BreakingProxy)
    thread = threading.Thread(target=front.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{front.server_address[1]}"
    front.shutdown()
    front.server_close()


def test_a_server_that_breaks_requests_and_dies_loses_and_doubles_nothing(
    finished: Path, server: Server, proxy: str
) -> None:
    BreakingProxy.broken = 0.25
    rng, passes = random.Random(3), 0
    for passes in range(1, 200):
        child = forked(lambda: track(options(proxy, finished)))
        if passes <= 5:
            time.sleep(rng.random())
            os.kill(child, signal.SIGKILL)
        if passes == 3:
            server.kill()
            server.start()
        if status_of(child) == 0:
            break
    BreakingProxy.broken = 0.0
    track(options(proxy, finished))  # healthy again: what lost answers left behind is put right
    assert passes > 5 and all(BreakingProxy.faults[name] for name in ("500", "503", "reset", "lost", "slow"))
    held = contents(server.database)
    check_whole(held, finished)
    track(options(proxy, finished))
    assert contents(server.database) == held


def test_lost_answers_leave_no_twins(server: Server, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BreakingProxy.broken = 0.0
    store = Store(proxy, "twins")
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
    run_id = store.run("key", "twin", 1000, {})
    model_id = store.model("model", "twin", run_id, 1, {})
    store.register(model_id, run_id, {}, 1.0)
    assert lost == {"runs/create": 0, "logged-models": 0, "model-versions/create": 0}
    client = store._client
    assert [run.info.run_id for run in client.search_runs([store.experiment_id])] == [run_id]
    assert [model.model_id for model in client.search_logged_models([store.experiment_id])] == [model_id]
    assert len(client.search_model_versions("name = 'twins'")) == 1


def test_a_server_that_is_down_is_told_in_one_line_and_everything_is_kept(finished: Path, tmp_path: Path) -> None:
    uri = f"http://someone:s3cr3t@127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "image_diffusion.track", "--store", uri, "--project", "faults"]
    command += ["--experiment", str(finished), "--output", str(tmp_path / "tracked.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: MLflow at http://127.0.0.1:") and "s3cr3t" not in line
    assert not (tmp_path / "tracked.json").exists()
    database = tmp_path / "mlflow.db"
    track(options(f"sqlite:///{database}", finished))
    check_whole(contents(database), finished)


def test_a_follower_outlives_a_dead_server_and_sends_all_in_the_end(
    finished: Path, server: Server, proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    BreakingProxy.broken = 1.0
    stop = threading.Event()
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(follow(options(proxy, finished, follow=0.05, project="live"), stop))
    )
    thread.start()
    time.sleep(3)
    BreakingProxy.broken = 0.0
    time.sleep(0.5)
    stop.set()
    thread.join()
    assert [run["status"] for run in results[0]["runs"]] == ["finished"] * 3
    assert capsys.readouterr().err.count("warning: MLflow at") >= 1


def test_no_password_is_shown() -> None:
    assert without_password("postgresql+psycopg2://me:s3cr3t@db:5432/mlflow") == "postgresql+psycopg2://db:5432/mlflow"
    assert without_password("sqlite:////data/mlflow.db") == "sqlite:////data/mlflow.db"
