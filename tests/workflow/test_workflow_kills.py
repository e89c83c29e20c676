"""Everything killed at once, Snakemake included: the same command goes on and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from projects import Project

RESULTS = ["results/micro/train/weights.safetensors", "results/micro/samples/samples.npz", "results/micro/metrics.json"]


def wait_for(path: Path, running: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert running.poll() is None, f"ended before {path} was there"
        time.sleep(0.02)


@pytest.mark.parametrize("instant", ["results/datasets/dots-16/crops/shard-00000.tar", "results/micro/train/state"])
def test_the_same_command_goes_on(fresh: Project, made: Project, instant: str) -> None:
    with subprocess.Popen(
        fresh.command(), cwd=fresh.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        wait_for(fresh / instant, running)
        os.killpg(running.pid, signal.SIGKILL)
    fresh.run()
    for result in RESULTS:
        assert (fresh / result).read_bytes() == (made / result).read_bytes(), result


def test_a_second_snakemake_is_told_to_wait(fresh: Project) -> None:
    with subprocess.Popen(
        fresh.command(), cwd=fresh.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        wait_for(fresh / "logs/datasets/dots-16/crop.log", running)
        second = fresh.snakemake()
        os.killpg(running.pid, signal.SIGKILL)
    assert second.returncode == 1
    assert "Directory cannot be locked" in second.stdout
