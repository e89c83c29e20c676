"""Our jobs in a Slurm queue: those that nobody waits for any more, and those that a node could not begin."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

GO_ON = ("crop", "crop_part", "encode_part", "train")
"""Rules whose jobs go on from what is there: where one has just ended, the next finds its work done."""


@dataclass(frozen=True)
class Orphan:
    """A job that a Snakemake has sent which has died. comment: its rule and wildcards. submitted: seconds since
    1970."""

    job: str
    comment: str
    submitted: float


def orphans(folder: Path) -> list[Orphan]:
    """Our jobs in the queue that were sent from a folder, by whom is not said."""
    lines = (line.split("|") for line in _jobs() or ())
    return [
        Orphan(job, comment, datetime.fromisoformat(submitted).timestamp())
        for job, submitted, comment, sent_from in lines
        if comment.startswith("rule_") and sent_from == str(folder.absolute())
    ]


def settle(left: Sequence[Orphan], jobs: Iterable[Any], wait: bool, pause_s: float = 10.0) -> None:
    """Before anything is sent: wait for orphans that do what we would send a job for, and cancel the others, for which
    nobody waits any more. Such a job writes the same bytes, and may have waited in the queue for days.

    jobs: Snakemake's, those that will run. wait: else all are cancelled.
    """
    wanted = {_comment(job): _settled(job) for job in jobs if job.rule.name.endswith(GO_ON)} if wait else {}
    kept = [each for each in left if wanted.get(each.comment, math.inf) < each.submitted]
    if others := [each.job for each in left if each not in kept]:
        _tell(f"Cancelling what a killed Snakemake left in the queue: {' '.join(others)}")
        subprocess.run(["scancel", *others], check=False)
    for each in kept:
        _tell(
            f"Waiting for Slurm job {each.job} ({each.comment}), which a Snakemake has left that is gone: it does what "
            "this one would send. To cancel it: Ctrl-C, and the same command with --config orphans=cancel."
        )
        while is_in_queue(each.job):
            time.sleep(pause_s)


def is_in_queue(job: str) -> bool:
    """Whether a job waits or runs. Where Slurm does not answer, it may."""
    jobs = _jobs()
    return jobs is None or any(line.split("|")[0] == job for line in jobs)


def _jobs() -> list[str] | None:
    """Our jobs, a line each: number, when it was submitted, comment, folder. None where Slurm does not answer."""
    if not shutil.which("squeue"):
        return None
    queue = ["squeue", "--me", "--noheader", "--format=%i|%V|%k|%Z"]
    done = subprocess.run(queue, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def _comment(job: Any) -> str:
    """What Snakemake's plugin for Slurm writes beside a job."""
    wildcards = "_".join(job.wildcards).replace("/", "_")
    return f"rule_{job.rule.name}_wildcards_{wildcards}" if wildcards else f"rule_{job.rule.name}"


def _settled(job: Any) -> float:
    """When the configuration of a job, or its code, last changed."""
    config = Path(job.input.config)
    return max(path.stat().st_mtime for path in (config, config.with_suffix(".code")) if path.exists())


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


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
