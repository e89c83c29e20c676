"""Our jobs in a Slurm queue: those that nobody waits for any more, and those that a node could not begin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def cancel_jobs(folder: Path) -> None:
    """Cancel our Slurm jobs that were sent from a folder: nobody waits for them any more."""
    if not shutil.which("squeue"):
        return
    queue = ["squeue", "--me", "--noheader", "--format=%i %k|%Z"]
    lines = subprocess.run(queue, capture_output=True, text=True, check=False).stdout.splitlines()
    jobs = [line.split()[0] for line in lines if " rule_" in line and line.endswith(f"|{folder.absolute()}")]
    if jobs:
        print(f"Cancelling what a killed Snakemake left in the queue: {' '.join(jobs)}", file=sys.stderr)
        subprocess.run(["scancel", *jobs], check=False)


def tell_of_unseen_jobs(logs: Iterable[str | Path]) -> None:
    """Name the Slurm jobs that failed before they could open their log: nothing else says why.

    logs: the files that Snakemake logs to.
    """
    said = "".join(Path(log).read_text() for log in logs)
    their_logs = dict(re.findall(r"SLURM jobid (\d+) \(log: (.+?)\)\.", said))
    failed = re.findall(r"SLURM-job '(\d+)' failed", said)
    if jobs := [job for job in failed if job in their_logs and not Path(their_logs[job]).exists()]:
        print(
            f"error: Slurm {'jobs' if jobs[1:] else 'job'} {', '.join(jobs)} left no log: a node does not see "
            f"{Path.cwd()}. Clone into a folder that every node shares, and run there.",
            file=sys.stderr,
        )
