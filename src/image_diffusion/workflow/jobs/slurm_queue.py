"""The workflow's jobs in a Slurm queue: orphaned jobs, jobs that a node could not start, and failed jobs, according to
the records of their stages and one query to Slurm.

Snakemake resubmits a failed job up to `--retries` times. Only the count of attempts that ran out of memory runs inside
its scheduler; it reads files of this folder and does not query Slurm.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from image_diffusion.core.process.command import JobOutcome, read_attempts
from image_diffusion.core.process.errors import log_line

GO_ON = ("crop", "crop_part", "encode_part", "train")
"""Rules whose jobs resume from existing results, so that a job repeated after its end does no work."""


@dataclass(frozen=True)
class Orphan:
    """A job submitted by a Snakemake that has ended. comment: rule and wildcards. submitted: seconds since 1970."""

    job: str
    comment: str
    submitted: float


def orphans(folder: Path) -> list[Orphan]:
    """Return this user's jobs in the queue that any Snakemake submitted from a folder."""
    lines = (line.split("|") for line in _jobs() or ())
    return [
        Orphan(job, comment, datetime.fromisoformat(submitted).timestamp())
        for job, submitted, comment, sent_from in lines
        if comment.startswith("rule_") and sent_from == str(folder.absolute())
    ]


def settle_orphans(left: Sequence[Orphan], jobs: Iterable[Any], wait: bool, pause_s: float = 10.0) -> None:
    """Before submitting jobs, wait for orphans that do the work of a pending job, and cancel all others. An orphan
    writes the same bytes as a new job, and may have waited in the queue for days.

    jobs: Snakemake's pending jobs. wait: False cancels all orphans.
    """
    wanted = {_comment(job): _settled(job) for job in jobs if job.rule.name.endswith(GO_ON)} if wait else {}
    running = [job for job in left if wanted.get(job.comment, math.inf) <= job.submitted]
    if others := [job.job for job in left if job not in running]:
        log_line(f"Cancelling what a killed Snakemake left in the queue: {' '.join(others)}")
        subprocess.run(["scancel", *others], check=False)
    for job in running:
        log_line(
            f"Waiting for Slurm job {job.job} ({job.comment}), which a Snakemake has left that is gone: it does what "
            "this one would send. To cancel it: Ctrl-C, and the same command with --config orphans=cancel."
        )
        while is_in_queue(job.job):
            time.sleep(pause_s)


def is_in_queue(job: str) -> bool:
    """Return True if a job is pending or running, or if Slurm does not answer."""
    jobs = _jobs()
    return jobs is None or any(line.split("|")[0] == job for line in jobs)


def _jobs() -> list[str] | None:
    """Return this user's jobs, a line each: number, submission time, comment, folder; None if Slurm does not answer."""
    if not shutil.which("squeue"):
        return None
    queue = ["squeue", "--me", "--noheader", "--format=%i|%V|%k|%Z"]
    done = subprocess.run(queue, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def _comment(job: Any) -> str:
    """Return the comment that Snakemake's Slurm plugin sets for a job."""
    wildcards = "_".join(job.wildcards).replace("/", "_")
    return f"rule_{job.rule.name}_wildcards_{wildcards}" if wildcards else f"rule_{job.rule.name}"


def _settled(job: Any) -> float:
    """Return the whole second in which the configuration of a job, or its code, last changed."""
    config = Path(job.input.config)
    changed = max(path.stat().st_mtime for path in (config, config.with_suffix(".code")) if path.exists())
    # Slurm rounds submission times to seconds, and a job is often sent in the second its configuration was written.
    return math.floor(changed)


def tell_of_unseen_jobs(logs: Iterable[str | Path]) -> None:
    """Report the Slurm jobs that failed before they could open their log, which nothing else reports.

    logs: the files that Snakemake logs to.
    """
    said = "".join(Path(log).read_text() for log in logs)
    their_logs = dict(re.findall(r"SLURM jobid (\d+) \(log: (.+?)\)\.", said))
    failed = re.findall(r"SLURM-job '(\d+)' failed", said)
    if jobs := [job for job in failed if job in their_logs and not Path(their_logs[job]).exists()]:
        log_line(
            f"error: Slurm {'jobs' if jobs[1:] else 'job'} {', '.join(jobs)} left no log: a node does not see "
            f"{Path.cwd()}. Clone into a folder that every node shares, and run there."
        )


SLURM_ANSWERS_S = 10.0
"""Timeout in seconds of a query to Slurm, after all jobs have ended."""

_STAGE_LOGS, _SLURM_LOGS = Path("logs"), Path(".snakemake", "slurm_logs")
_KILLED_FOR_MEMORY = re.compile(r"oom[-_ ]?kill|exceeded memory limit|out.of.memory", re.IGNORECASE)


def count_out_of_memory(logs: Path, since: float) -> int:
    """Count the attempts of stages that ran out of memory.

    logs: the folder of the stages' logs. since: seconds since 1970; attempts that began before do not count.
    """
    notes = [*logs.glob("*.attempt"), *logs.glob("*/*.attempt")]
    attempts = [attempt for note in notes for attempt in read_attempts(note) if attempt.began >= since]
    return sum(map(ran_out_of_memory, attempts))


def ran_out_of_memory(attempt: JobOutcome) -> bool:
    """Return True if an attempt ran out of memory, by the stage's record or, if it was killed, by its Slurm log."""
    if attempt.ending is not None:
        return attempt.ending == "memory"
    logs = _SLURM_LOGS.rglob(f"{attempt.job}.log")
    return any(_KILLED_FOR_MEMORY.search(log.read_text(errors="replace")) for log in logs)


def report_failed_jobs(logs: Iterable[str | Path], since: float) -> None:
    """Print a line for each stage whose last job failed, with its ending and Slurm's facts about the job.

    A stage that recorded its ending has failed, even in a job shared by several stages, whose number Snakemake does not
    log. A killed stage recorded nothing; its job is named as failed in Snakemake's log.

    logs: the files that Snakemake logs to. since: seconds since 1970; attempts that began before do not count.
    """
    failed = set(re.findall(r"SLURM-job '(\d+)' failed", "".join(Path(log).read_text() for log in logs)))
    last = {note: attempts[-1] for note in sorted(_STAGE_LOGS.rglob("*.attempt")) if (attempts := read_attempts(note))}
    stages_of_jobs: dict[str, list[tuple[str, JobOutcome]]] = defaultdict(list)
    for note, attempt in last.items():
        if attempt.job in failed or (attempt.ending is not None and attempt.began >= since):
            stage = str(note.relative_to(_STAGE_LOGS)).removesuffix(".log.attempt")
            stages_of_jobs[attempt.job].append((stage, attempt))
    states = ask_slurm(stages_of_jobs) if stages_of_jobs else {}
    for job, stages in stages_of_jobs.items():
        # Of the stages that share a job, those that recorded their ending have failed.
        for stage, attempt in [(stage, attempt) for stage, attempt in stages if attempt.ending] or stages:
            sentences = [_ending(f"{stage} (job {job}, {attempt.host})", attempt), states.get(job, "")]
            log_line(" ".join(["error:", *filter(None, sentences)]))


def _ending(stage: str, attempt: JobOutcome) -> str:
    if attempt.ending == "mistake":
        return f"{stage} failed and would fail so again: {attempt.said}"
    if attempt.ending == "stopped":
        return f"{stage} was stopped; the same command continues it: {attempt.said}"
    if ran_out_of_memory(attempt):
        return f"{stage} ran out of memory. {attempt.said}".rstrip()
    return f"{stage} failed. {attempt.said}".rstrip()


def ask_slurm(jobs: Collection[str]) -> dict[str, str]:
    """Return Slurm's facts about jobs, one sentence each, from its accounting or, without an answer, from its
    controller. Jobs unknown to both are left out."""
    numbers = ",".join(jobs)
    accounts = _slurm_output(
        "sacct", f"--jobs={numbers}", "--noheader", "--parsable2", "--format=JobID,State,ExitCode,MaxRSS"
    )
    facts: dict[str, list[str]] = {}
    memory: dict[str, list[str]] = defaultdict(list)
    for line in accounts:
        name, state, code, used = line
        job = name.partition(".")[0]
        facts.setdefault(job, [state, f"exit code {code}"])
        memory[job] += [used] if used else []
    for job, used_by_steps in memory.items():
        if used_by_steps:
            facts[job].append(f"{max(used_by_steps, key=lambda used: (len(used), used))} of memory used")
    if not facts:
        queue = _slurm_output("squeue", f"--jobs={numbers}", "--states=all", "--noheader", "--format=%i|%T|%r")
        facts = {job: [word for word in words if word != "None"] for job, *words in queue}
    return {job: f"Slurm: {', '.join(words)}." for job, words in facts.items()}


def _slurm_output(*command: str) -> list[list[str]]:
    """Return the fields of each line that a command prints; empty if it is missing, fails or takes too long."""
    if not shutil.which(command[0]):
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SLURM_ANSWERS_S)
    except subprocess.TimeoutExpired:
        return []
    return [line.split("|") for line in done.stdout.splitlines()] if done.returncode == 0 else []
