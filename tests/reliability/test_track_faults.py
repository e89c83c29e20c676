"""Tracking loses and duplicates nothing: replays, SIGKILL at any instant, many processes at once."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tracked import check_same, check_whole, contents, forked, make_experiment, status_of, track

from image_diffusion.core.files.atomic import write_json, write_text
from image_diffusion.core.journal.reader import read_journal
from image_diffusion.core.journal.writer import Journal
from image_diffusion.core.process import command
from image_diffusion.tracking.live import follow, send
from image_diffusion.tracking.plan import Request
from image_diffusion.workflow.damage import Damage

pytestmark = pytest.mark.slow


def test_everything_arrives_once_and_a_replay_adds_nothing(finished: Path, sent: tuple[Path, dict[str, Any]]) -> None:
    database, tracked = sent
    held = contents(database)
    check_whole(held, finished)
    assert track(f"sqlite:///{database}", finished) == tracked
    check_same(contents(database), held)


def test_replay_sends_no_point_again(
    finished: Path, sent: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow searches its points for one of a batch that it already has: 45,000 took 80 seconds to send again."""

    from mlflow import MlflowClient  # takes seconds, which collecting the tests should not

    batches = []
    log_batch = MlflowClient.log_batch
    monkeypatch.setattr(
        MlflowClient,
        "log_batch",
        lambda client, run_id, **values: (batches.append(values), log_batch(client, run_id, **values)),
    )
    database, tracked = sent
    assert track(f"sqlite:///{database}", finished) == tracked
    about_models = [metric.model_id for batch in batches for metric in batch.get("metrics", ())]
    assert None not in about_models


def test_live_tracking_logs_no_model_and_final_call_does(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    """Scores that were sent before there was a model then belong to it."""

    database = tmp_path / "mlflow.db"
    shutil.copy(empty, database)
    from image_diffusion.tracking.tracker import Tracker  # as above

    tracker = Tracker(f"sqlite:///{database}", "faults")
    tracker.send(Request(finished), live=True)
    assert not contents(database)["models"]
    track(f"sqlite:///{database}", finished)
    check_same(contents(database), contents(sent[0]))


@pytest.mark.parametrize("kind", ["cut", "zeroed", "emptied", "removed", "folder removed", "one bit flipped"])
def test_journal_with_lost_records_gives_finished_run_tagged_incomplete(
    empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A new store is filled from the journals, as on another machine or after damage to the old one."""
    experiment, database = make_experiment(tmp_path / "demo", steps=12), tmp_path / "mlflow.db"
    shutil.copy(empty, database)
    for attempt in (experiment / "journal" / "train").glob("attempt-*.jsonl"):
        data = attempt.read_bytes()
        match kind:
            case "cut":
                attempt.write_bytes(data[: len(data) * 7 // 10])
            case "zeroed":
                attempt.write_bytes(bytes(len(data)))
            case "emptied":
                attempt.write_bytes(b"")
            case "removed":
                attempt.unlink()
            case "one bit flipped":
                middle = len(data) // 2
                attempt.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    if kind == "folder removed":
        shutil.rmtree(experiment / "journal")
    track(f"sqlite:///{database}", experiment)
    held = contents(database)
    assert ("demo", "FINISHED") in [run[:2] for run in held["runs"]]
    (incomplete,) = (value for run, key, value in held["tags"] if (run, key) == ("demo", "incomplete"))
    assert re.fullmatch(r"\d+ of \d+ records are lost", incomplete)
    from mlflow.entities import LoggedModelStatus  # as above

    assert held["models"] == [("demo", LoggedModelStatus.READY.to_int())]
    said = capsys.readouterr().err
    assert "records of attempt" in said or "is damaged and left out" in said


def test_damaged_artifacts_are_detected_and_sent_again(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file of every run and model, in one way each; a file that somebody else added is left unchanged."""
    monkeypatch.chdir(tmp_path)
    experiment, database = make_experiment(tmp_path / "demo", steps=12), tmp_path / "mlflow.db"
    shutil.copy(empty, database)

    def fault() -> str | None:
        write_json(tmp_path / "tracked.json", track(f"sqlite:///{database}", experiment))
        return Damage("sqlite:///mlflow.db").fault_of(Path("tracked.json"))

    assert fault() is None
    whole, tracked = contents(database), Path("tracked.json")
    files = sorted(path for path in (tmp_path / "mlruns").rglob("*") if path.is_file() and "artifacts" in path.parts)
    assert {"weights.safetensors", "MLmodel", "image_diffusion.zip", "model.json"} <= {path.name for path in files}
    assert {".webp", ".png"} <= {path.suffix for path in files}

    def damage(number: int, path: Path) -> None:
        data = path.read_bytes()
        match number % 3:
            case 0:
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            case 1:
                path.write_bytes(data[: len(data) // 2])
            case 2:
                path.unlink()

    for number, path in enumerate(files):
        data = path.read_bytes()
        damage(number, path)
        told = Damage("sqlite:///mlflow.db").fault_of(tracked)
        assert told is not None and path.name in told
        path.write_bytes(data)
    assert Damage("sqlite:///mlflow.db").fault_of(tracked) is None
    for number, path in enumerate(files):
        damage(number, path)
    theirs = files[0].with_name("theirs.txt")
    theirs.write_text("a person's")
    capsys.readouterr()
    assert fault() is None
    said = capsys.readouterr().err
    assert all(f"{path} was damaged or missing and has been sent again" in said for path in files)
    theirs.write_text("a person's, changed")
    assert fault() is None and theirs.read_text() == "a person's, changed"
    theirs.unlink()
    check_same(contents(database), whole)


def test_copied_or_moved_store_uses_its_own_artifacts(empty: Path, tmp_path: Path) -> None:
    """The store refers to its files by absolute paths: a copy would replace the files of the original."""
    from mlflow import MlflowClient  # as above

    def track_apart(folder: Path) -> None:
        """Track in a new process, as a command does: MLflow caches the location of a run's files in a process."""
        assert status_of(forked(lambda: track(f"sqlite:///{folder}/mlflow.db", folder / "demo"))) == 0

    def files_of(folder: Path) -> dict[str, bytes]:
        mlruns = folder / "mlruns"
        return {str(path.relative_to(mlruns)): path.read_bytes() for path in mlruns.rglob("[!.]*") if path.is_file()}

    def check_locations(folder: Path) -> None:
        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        experiments = {experiment.name: experiment for experiment in client.search_experiments()}
        assert {name: experiments[name].artifact_location for name in elsewhere} == elsewhere
        assert experiments["made in the UI"].artifact_location == f"{folder}/mlruns/2"
        own = experiments["faults"]
        (version,) = client.search_model_versions()
        locations = [
            own.artifact_location,
            *(run.info.artifact_uri for run in client.search_runs([own.experiment_id])),
            *(model.artifact_location for model in client.search_logged_models([own.experiment_id])),
            client.get_model_version_download_uri(version.name, version.version),
        ]
        assert len(locations) == 6
        assert [uri for uri in locations if not uri.startswith((folder / "mlruns" / "faults").as_uri())] == []

    base, copy, moved = tmp_path / "bäse, 1", tmp_path / "cöpy 2", tmp_path / "moved"
    make_experiment(base / "demo", steps=12)
    shutil.copy(empty, base / "mlflow.db")
    track_apart(base)
    elsewhere = {"remote": "s3://bucket/mlruns/remote", "local": f"file://{tmp_path}/mlruns/local"}
    for name, location in {**elsewhere, "made in the UI": f"{base}/mlruns/2"}.items():
        MlflowClient(f"sqlite:///{base}/mlflow.db").create_experiment(name, location)
    files = files_of(base)

    shutil.copytree(base, copy)
    with (copy / "demo" / "train" / "model.json").open("a") as model:
        model.write("\n")
    track_apart(copy)
    assert files_of(base) == files
    assert files_of(copy).keys() == files.keys() and files_of(copy) != files
    check_locations(copy)

    base.rename(moved)
    track_apart(moved)
    assert not base.exists() and files_of(moved) == files
    check_locations(moved)


def test_artifact_locations_outside_store_are_kept(empty: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient  # as above

    from image_diffusion.tracking.tracker import Tracker

    shutil.copy(empty, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client, locations = MlflowClient(uri), ("s3://bucket/mlruns/p0", "/elsewhere/mlruns/1", "file:///elsewhere/p2")
    for number, location in enumerate(locations):
        client.create_experiment(f"p{number}", location)
        Tracker(uri, f"p{number}")
        assert client.get_experiment_by_name(f"p{number}").artifact_location == location


def test_damaged_store_is_reported_with_remedy(tmp_path: Path) -> None:
    from image_diffusion.tracking.connection import TrackingError
    from image_diffusion.tracking.tracker import Tracker

    (tmp_path / "mlflow.db").write_bytes(b"x" * 4096)
    with pytest.raises(TrackingError, match=rf"not a database\. Move {tmp_path}/mlflow\.db away and run the"):
        Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "project")


def test_tracking_killed_at_any_instant_is_completed_by_next_call(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    """SIGKILL from the creation of the database to the last tag, for three stores, each until it was completed."""
    whole = contents(sent[0])
    rng, kills = random.Random(0), 0
    for trial in range(3):
        database = tmp_path / str(trial) / "mlflow.db"
        if trial > 0:  # creating it takes longest: once is enough
            database.parent.mkdir()
            shutil.copyfile(empty, database)
        given_s = 0.1
        while True:
            child = forked(lambda: track(f"sqlite:///{database}", finished))  # noqa: B023
            time.sleep(given_s * rng.random())
            os.kill(child, signal.SIGKILL)
            if status_of(child) == 0:
                break
            kills += 1
            given_s *= 1.3  # soon killed at first; in the end it gets through
        check_same(contents(database), whole)
    assert kills >= 20


def test_eight_processes_fill_one_new_store(tmp_path: Path) -> None:
    experiments = [make_experiment(tmp_path / f"demo-{i}", steps=60) for i in range(8)]
    database = tmp_path / "mlflow.db"
    children = [
        forked(lambda e=each: track(f"sqlite:///{database}", e), each / "said")  # type: ignore[misc]
        for each in experiments
    ]
    assert [status_of(child) for child in children] == [0] * 8
    assert "".join((each / "said").read_text() for each in experiments) == ""  # no lock error, no warning
    held = contents(database)
    assert len(held["runs"]) == 24
    counts = Counter(run for run, *_ in held["metrics"].elements())
    assert {counts[each.name] for each in experiments} == {3 * 60 + 1}
    assert len(held["models"]) == 8 and held["versions"] == [(8,)] and held["aliases"] == [("faults.fid", "best")]


def test_two_processes_send_one_experiment(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)
    children = [forked(lambda: track(f"sqlite:///{database}", finished)) for _ in range(2)]
    assert [status_of(child) for child in children] == [0, 0]
    check_same(contents(database), contents(sent[0]))


def _track(database: Path, experiment: Path) -> None:
    track(f"sqlite:///{database}", experiment)


LOCKED = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
database.execute("ROLLBACK")
"""


def test_tracking_waits_for_locked_store(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)
    with subprocess.Popen([sys.executable, "-c", LOCKED, database, "7"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        child = forked(lambda: command.run(lambda: _track(database, finished)), tmp_path / "said")
        assert status_of(child) == 0, (tmp_path / "said").read_text()
        assert other.wait() == 0
    check_same(contents(database), contents(sent[0]))


def test_full_store_is_reported_and_completed_later(
    finished: Path, sent: tuple[Path, dict[str, Any]], empty: Path, tmp_path: Path
) -> None:
    """No file may grow beyond a limit, as on a full disk or with a quota."""
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)

    def without_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = database.stat().st_size + 20_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        command.run(lambda: _track(database, finished))

    assert status_of(forked(without_room, tmp_path / "said")) == 1
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[-1].startswith("error: MLflow at sqlite:///"), said
    assert "Traceback" not in said
    track(f"sqlite:///{database}", finished)
    check_same(contents(database), contents(sent[0]))


def train_until_killed(folder: Path, pause_s: float) -> None:
    """Run a minimal stage: a checkpoint every ten steps, and the same numbers again after each restart."""
    checkpoint = folder / "checkpoint"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with Journal.open(folder / "journal", "train", resume_step=start, tags={"fingerprint": "f"}) as journal:
        for step in range(start + 1, 201):
            journal.metrics({"loss": 1 / step}, step=step)
            time.sleep(pause_s)
            if step % 10 == 0:
                write_text(checkpoint, str(step))


def test_killed_follower_and_killed_training_lose_no_point(tmp_path: Path, empty: Path) -> None:
    """Points of a dead attempt that were shown while it lived are kept; the next one does not add the same steps."""
    rng, folder = random.Random(1), tmp_path / "live"
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)

    def follow_for_ever() -> None:
        here = partial(send, f"sqlite:///{database}", "faults")
        follow(here, [Request(folder)], 0.02, threading.Event(), share=1.0)

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
    track(f"sqlite:///{database}", folder)
    history = read_journal(folder / "journal" / "train")
    assert history is not None
    held = [(key, step) for _, key, _, step, *_ in contents(database)["metrics"].elements()]
    assert sorted(held) == [("loss", step) for step in range(1, 201)]
    assert len(history.starts) > 2 and len(history.superseded) > 0


def test_values_that_the_store_changes_are_sent_once(tmp_path: Path, empty: Path) -> None:
    """MLflow stores an infinite value as the largest number, and -0.0 as 0.0."""
    database = tmp_path / "mlflow.db"
    shutil.copyfile(empty, database)
    values = {"large": float("inf"), "small": float("-inf"), "zero": -0.0, "undefined": float("nan")}
    first = Journal.open(tmp_path / "demo/journal", "train", tags={"fingerprint": "f"})
    first.metrics(values, step=2)
    track(f"sqlite:///{database}", tmp_path / "demo")
    first.close("failed")
    time.sleep(0.01)  # the points of the next attempt have another time
    with Journal.open(tmp_path / "demo/journal", "train", 1, {"fingerprint": "f"}, after=first.attempts) as second:
        second.metrics(values, step=2)
    track(f"sqlite:///{database}", tmp_path / "demo")
    keys = [key for _, key, *_ in contents(database)["metrics"].elements()]
    assert sorted(keys) == sorted(values)
