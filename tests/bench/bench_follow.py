"""Memory and CPU time of the process that follows a training, while its journal grows.

    python tests/bench/bench_follow.py
    PYTHONPATH=../another-checkout/src python tests/bench/bench_follow.py

The journal is that of a long training: so many points lie in it, and one more is written each second. Each figure is
of another process: the one that stays, and those that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.journal.writer import Journal

PLAN = {"codec_experiment": None, "dataset": "digits-32", "headline": "inpipe_fd", "embeddings_experiment": None}


def peak_mb(pid: int) -> float:
    """Return the peak memory of a process so far, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="that have been logged, ten metrics each (2000)")
    parser.add_argument("--seconds", type=float, default=120, help="how long it is watched (120)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        experiment = Path(temporary, "results", "demo")
        write_json(experiment / "config" / "plan.json", PLAN)
        command = [
            sys.executable,
            "-m",
            "image_diffusion",
            "track",
            "--store",
            "sqlite:///mlflow.db",
            "--project",
            "p",
        ]
        with Journal.open(experiment / "journal", "train") as journal:
            for step in range(given.steps):
                journal.metrics({f"train/metric_{i}": step / (i + 1) for i in range(10)}, step=step)
            process = subprocess.Popen(
                [*command, "--results", "results", "--follow", "demo"], cwd=temporary, stdin=subprocess.PIPE
            )
            stays, others = 0.0, 0.0
            until = time.monotonic() + given.seconds
            while time.monotonic() < until:
                step += 1
                journal.metrics({f"train/metric_{i}": step / (i + 1) for i in range(10)}, step=step)
                for _ in range(10):
                    stays = max(stays, peak_mb(process.pid))
                    for child in children(process.pid):
                        with suppress(OSError):  # it has ended
                            others = max(others, peak_mb(child))
                    time.sleep(0.1)
        assert process.stdin is not None
        process.stdin.close()
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
    cpu_s = usage.ru_utime + usage.ru_stime
    print(json.dumps({"stays_mb": round(stays), "senders_mb": round(others), "cpu_s_with_the_end": round(cpu_s, 1)}))


if __name__ == "__main__":
    main()
