"""Real trainings and the process that follows them, killed at random instants, with a failing server.

Afterwards MLflow has every point exactly once, and the trainings' bytes are those of one that nobody followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from attempts import Attempts, Outcome, finished, killed_run
from breaking import BreakingProxy, Server
from comparison import results
from tracked import forked, status_of

from image_diffusion.core.journal.reader import Point
from image_diffusion.tracking.live import follow, send
from image_diffusion.tracking.plan import Request
from image_diffusion.tracking.run_summary import scalars, shown_points

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("IMAGE_DIFFUSION_KILLS", "50"))
WEATHER = ("fine", "broken", "500", "slow", "dead")
"""State of the server: answers; breaks 30 % of the requests; answers 500; takes 5 s; is not running."""
ARRIVAL_S = 120


class Follower:
    """The process that follows experiments; a thread kills and restarts it at random instants."""

    def __init__(self, proxy: str, folders: list[Path], draw: random.Random) -> None:
        self._proxy, self._folders, self._draw = proxy, folders, draw
        self._over, self.kills = threading.Event(), 0
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        def work() -> None:
            requests = [Request(folder) for folder in self._folders]
            follow(partial(send, self._proxy, "live"), requests, 0.05, threading.Event(), share=1.0)

        while not self._over.is_set():
            child = forked(work)
            self._over.wait(self._draw.uniform(0.0, 4.0))
            os.kill(child, signal.SIGKILL)
            assert status_of(child) == -signal.SIGKILL
            self.kills += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def change_weather(weather: str, server: Server) -> None:
    """Put the server into this state."""
    BreakingProxy.broken = {"broken": 0.3, "500": 1.0, "slow": 1.0}.get(weather, 0.0)
    BreakingProxy.names = ("500",) if weather == "500" else ("slow",) if weather == "slow" else BreakingProxy.all_names
    BreakingProxy.delay_s = 5.0 if weather == "slow" else 0.3
    if weather == "dead":
        server.kill()
    elif not server.is_alive():
        server.start()


def in_mlflow(database: Path, experiment: str) -> Counter[tuple[str, int]]:
    """Return how often every (metric, step) of a training is in MLflow."""
    query = """
        SELECT metrics.key, step FROM metrics JOIN tags USING (run_uuid) JOIN runs USING (run_uuid)
        WHERE tags.key = 'experiment' AND tags.value = ? AND lifecycle_stage = 'active'
    """
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return Counter(connection.execute(query, (experiment,)).fetchall())


def wait_for_arrival(database: Path, experiment: str) -> None:
    """Wait until a follower, which is still killed at random instants, has sent a point of the training."""
    until = time.monotonic() + ARRIVAL_S
    while not in_mlflow(database, experiment):
        assert time.monotonic() < until, f"nothing of {experiment} arrived within {ARRIVAL_S} s before a fine server"
        time.sleep(0.1)


@pytest.mark.long
def test_killed_followers_and_failing_server_lose_and_duplicate_no_point(
    attempts: Attempts, server: Server, proxy: str, tmp_path: Path, empty: Path
) -> None:
    from image_diffusion.tracking.tracker import Tracker

    usual: Outcome = finished(attempts, tmp_path / "alone")
    expected = results(tmp_path / "alone")
    draw, killed, folders = random.Random(11), 0, []
    weathers = [WEATHER[i % len(WEATHER)] for i in range(max(len(WEATHER), KILLS // 10))]
    for number, weather in enumerate(weathers):
        change_weather(weather, server)
        while killed < (number + 1) * KILLS // len(weathers):
            folders.append(tmp_path / f"run-{len(folders)}")
            follower = Follower(proxy, folders[-2:], random.Random(len(folders)))
            killed += killed_run(attempts, folders[-1], draw, 8, usual)
            if weather == "fine":
                wait_for_arrival(server.database, folders[-1].name)
            follower.end()
            killed += follower.kills
            assert results(folders[-1]) == expected, f"after {killed} kills, with a server that is {weather}"
    change_weather("fine", server)
    tracker = Tracker(proxy, "live")
    for folder in folders:
        tracker.send(Request(folder))
        once = Counter(dict.fromkeys(all_points(tmp_path / "alone"), 1))
        assert in_mlflow(server.database, folder.name) == once, folder.name


def all_points(folder: Path) -> set[tuple[str, int]]:
    """Return (metric, step) of all points that the run of an undisturbed training shows."""
    (attempt,) = (folder / "journal" / "train").glob("attempt-*.jsonl")
    found = []
    for line in attempt.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics":
            seen = {"examples_seen": record["examples_seen"]} if "examples_seen" in record else {}
            found += [Point(key, value, record["step"], 0) for key, value in (record["values"] | seen).items()]
    kept = shown_points(found)
    return {(point.key, point.step) for point in (*kept, *scalars(kept, "fid"))}
