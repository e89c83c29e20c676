"""What stages log is in MLflow while they run, and nothing of it outlives Snakemake."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from projects import Project

pytestmark = pytest.mark.slow

POINTS = """
SELECT count(*) FROM metrics JOIN runs USING (run_uuid) JOIN tags USING (run_uuid)
WHERE tags.key = 'stage' AND tags.value = 'train' AND metrics.key = 'train/loss' AND runs.status = ?
"""


def points(project: Project, status: str) -> int:
    """How many losses MLflow holds of trainings with this status."""
    database = project / "mlflow.db"
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return int(connection.execute(POINTS, (status,)).fetchone()[0])


def followers(project: Project) -> list[int]:
    """The processes that follow this project."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = (process / "cwd").resolve() == project.folder.resolve()
            if mine and b"image_diffusion.follow" in (process / "cmdline").read_bytes():
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


def test_curves_arrive_while_training_runs_and_no_process_stays(fresh: Project) -> None:
    """Snakemake is killed while it trains; another training then comes to its end."""
    settings = fresh / "config/config.yaml"
    settings.write_text(settings.read_text().replace("every_s:", "every_s: 1"))
    fresh.edit(lambda experiment: experiment["train"].update(steps=100_000))
    with subprocess.Popen(
        fresh.command(), cwd=fresh.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        wait_until("a loss is shown", lambda: points(fresh, "RUNNING") > 0, running)
        assert len(followers(fresh)) == 1
        os.killpg(running.pid, signal.SIGKILL)
    wait_until("the follower ends", lambda: not followers(fresh))

    fresh.edit(lambda experiment: experiment["train"].update(steps=8, seed=1))
    assert "warning: MLflow" not in fresh.run("results/micro/train/weights.safetensors")
    assert not followers(fresh)
    said = (fresh / "logs/follow.log").read_text()
    assert points(fresh, "FINISHED") > 0 and points(fresh, "RUNNING") == 0, said


def test_a_store_that_is_down_stops_nothing(fresh: Project) -> None:
    settings = fresh / "config/config.yaml"
    text = settings.read_text().replace("every_s:", "every_s: 1")
    settings.write_text(text.replace("sqlite:///mlflow.db", "http://127.0.0.1:9"))
    said = fresh.run("results/micro/train/weights.safetensors")
    assert "warning: MLflow did not take everything yet" in said
    assert not followers(fresh)
