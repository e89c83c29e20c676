"""Whether a failed job of a queue is sent again: after an accident, and with more memory where that ran out, but not
after a mistake, which would end the same way. Snakemake asks a rule for the number of its attempts, and not the job
that failed; what is changed here is looked for first, and a Snakemake that has it no longer is refused."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from image_diffusion.core.attempt import Attempt, read_attempt
from image_diffusion.workflow.incomplete import WRITTEN_FOR
from image_diffusion.workflow.machine import MORE_MEMORY, Machine

OFTEN_SHORT = 3
"""How often a job is sent again with more memory."""
_KEEPS_ON = (
    "crop",
    "crop_part",
    "encode",
    "encode_part",
    "embed",
    "reference",
    "reference_part",
    "sample",
    "sample_part",
    "evaluate",
)
"""Stages beside training that go on where they were when their time was over."""
_OFTEN_OUT_OF_TIME = 20
_KILLED_FOR_MEMORY = re.compile(r"oom[-_ ]?kill|exceeded memory limit|out.of.memory", re.IGNORECASE)


def send_again_if_it_helps(machine: Machine) -> None:
    """From now on Snakemake sends a failed job again only where that can end otherwise, and says why it failed.

    machine: what the next attempt asks for.
    """
    job_class, group_class = _places()
    job_class.restart_times = property(lambda job: times_to_send(job, machine))
    group_class.restart_times = property(lambda group: times_to_send_all(group.jobs, machine))
    logging.getLogger("snakemake.logging").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether what Snakemake logs is to be seen. That a job failed and what it printed is not, where it was stopped in
    time: `times_to_send` says so in one line."""
    of_jobs = getattr(record, "job_error_info", None) or [vars(record)]
    logs = [log for of_job in of_jobs if "rule_name" in of_job for log in of_job.get("log") or ()]
    ends = (read_attempt(_note_beside(log)) for log in logs)
    return not any(end is not None and end.ending == "stopped" for end in ends)


def times_to_send(job: Any, machine: Machine) -> int:
    """How often Snakemake may send a job that has just failed again: as often as its rule says, or not at all.

    job: Snakemake's. Tells in one line why the job failed, where anybody knows.
    """
    times = job.rule.restart_times or 0
    attempt = read_attempt(_note(job)) if job.log else None
    if attempt is None:
        return int(times)
    _note(job).unlink(missing_ok=True)  # the next attempt writes its own
    reason, out_of_memory = why(attempt)
    name = f"{job.rule.name} of {', '.join(map(str, job.wildcards))} (job {attempt.job}, {attempt.host})"
    if attempt.ending == "mistake":
        _tell(f"{name} is not sent again, since it would end so again: {attempt.said}")
        return 0
    if out_of_memory:
        times_short = machine.ran_out_of_memory(job.wildcards)
        if times_short > OFTEN_SHORT:
            _tell(f"{name} ran out of memory for the {times_short}th time and is not sent again. {reason}")
            return 0
        _tell(f"{name} ran out of memory; the next attempt asks for {MORE_MEMORY:g} times as much. {reason}")
    elif attempt.ending == "stopped":
        _tell(f"{name} was stopped and goes on in the next job: {attempt.said}")
    elif "TIMEOUT" in reason and job.rule.name.endswith(_KEEPS_ON):
        times = max(times, _OFTEN_OUT_OF_TIME)
        _tell(f"{name} ran out of time and goes on in the next job. {reason}")
    else:
        _tell(f"{name} failed. {attempt.said} {reason}".replace("  ", " "))
    return int(times)


def times_to_send_all(jobs: Iterable[Any], machine: Machine) -> int:
    """The same of stages that shared a job: those that it ended in say so, and without any of them all."""
    jobs = list(jobs)
    ended = [job for job in jobs if job.log and read_attempt(_note(job)) is not None]
    times = [times_to_send(job, machine) for job in ended or jobs]
    return min(times) if ended else max(times)


def _note(job: Any) -> Path:
    return _note_beside(job.log[0])


def _note_beside(log: str) -> Path:
    return Path(f"{log}.attempt")


def why(attempt: Attempt) -> tuple[str, bool]:
    """What Slurm says of the end of a job, in a sentence; and whether memory ran out."""
    logs = Path(".snakemake", "slurm_logs").rglob(f"{attempt.job}.log")
    said = "".join(log.read_text(errors="replace") for log in logs)
    state = _answer("sacct", "-j", attempt.job, "--noheader", "--parsable2", "--format=State,ExitCode,MaxRSS,NodeList")
    if state:
        lines = [line.split("|") for line in state.splitlines()]
        used = max((line[2] for line in lines if line[2]), key=lambda text: (len(text), text), default="")
        facts = [lines[0][0], f"exit code {lines[0][1]}", *([f"{used} of memory used"] if used else [])]
    else:
        record = _answer("scontrol", "show", "job", "--oneliner", attempt.job)
        found = dict(re.findall(r"(\w+)=(\S*)", record))
        facts = [found["JobState"], f"exit code {found.get('ExitCode')}"] if "JobState" in found else []
        if found.get("Reason", "None") != "None":
            facts.append(found["Reason"])
    killed = "OUT_OF_MEMORY" in "".join(facts) or _KILLED_FOR_MEMORY.search(said)
    return f"Slurm: {', '.join(facts)}." if facts else "", attempt.ending == "memory" or bool(killed)


def _answer(*command: str) -> str:
    """What Slurm answers; nothing where it does not."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _tell(sentence: str) -> None:
    print(sentence.rstrip(), file=sys.stderr, flush=True)


def _places() -> tuple[Any, Any]:
    from snakemake.jobs import GroupJob, Job

    if all(isinstance(getattr(each, "restart_times", None), property) for each in (Job, GroupJob)):
        return Job, GroupJob
    raise SystemExit(
        f"error: Snakemake {version('snakemake')} asks elsewhere how often a job is sent again than {WRITTEN_FOR}, "
        f"which this workflow was written for. Run: python -m pip install 'snakemake=={WRITTEN_FOR}.*'"
    )
