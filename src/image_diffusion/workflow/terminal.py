"""Terminal output of a run: one line at the start and one at the end of each job, instead of Snakemake's blocks.

Snakemake's log file has the full output, and logs/ the output of the stages. `--verbose` prints all of it. The handler
of the terminal is replaced once the workflow is read, because Snakemake refuses a profile with a logger plugin that is
not installed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from image_diffusion.workflow.studies import StudyPlan

VARIABLE = "IMAGE_DIFFUSION_BRIEF"
"""Environment variable that makes `logged` print only the messages of stages to the terminal."""

_HIDDEN_EVENTS = frozenset({"PROGRESS", "WORKFLOW_STARTED", "RESOURCES_INFO", "JOB_STARTED"})
_HIDDEN = (
    *("Building DAG of jobs", "Using shell:", "Provided cores:", "Provided cluster nodes:", "Provided remote nodes:"),
    *("Rules claiming more threads", "Conda environments: ignored", "Singularity containers: ignored"),
    *("Select jobs to execute", "Execute ", "Elapsed time:", "Job stats:"),
)
"""Prefixes of Snakemake's messages about itself."""


class BriefHandler(logging.Handler):
    """Print a line at the start and the end of each job; pass warnings, errors and other messages to Snakemake's
    handler.

    full: Snakemake's handler, with the stream. titles: text to print after the name of an experiment.
    """

    def __init__(self, full: logging.StreamHandler[Any]) -> None:
        super().__init__(full.level)
        self.filters = full.filters
        self._full = full
        self._begun: dict[int, tuple[str, float]] = {}
        self.titles: dict[str, str] = {}
        self._num_jobs, self._num_done = 0, 0
        self._clear = "\r\033[K" if full.stream.isatty() else ""  # the progress line that `logged` prints

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record or discard it."""
        line = self._line(record)
        if line is None:
            self._full.stream.write(self._clear)
            self._full.emit(record)
        elif line:
            self._full.stream.write(f"{self._clear}{time.strftime('%H:%M:%S')}  {line}\n")
            self._full.flush()

    def _line(self, record: logging.LogRecord) -> str | None:
        """Return the line for a record, "" to discard it, or None to let Snakemake print it."""
        event = getattr(getattr(record, "event", None), "name", None)
        values: Any = record  # has fields that Snakemake adds
        if record.levelno > logging.INFO or event in {"JOB_ERROR", "GROUP_ERROR", "SHELLCMD"}:
            return None
        if event == "RUN_INFO":
            self._num_jobs = values.stats["total"]
            several = [f"{rule} {count}" for rule, count in values.stats.items() if count > 1 and rule != "total"]
            jobs = "1 job, which logs" if self._num_jobs == 1 else f"{self._num_jobs} jobs, which log"
            return "\n".join([f"{jobs} to logs/", *several])
        if event == "JOB_INFO":
            name = values.log[0].removeprefix("logs/").removesuffix(".log") if values.log else values.rule_name
            if title := self.titles.get(name.partition("/")[0]):
                name = f"{name} ({title})"
            self._begun[values.jobid] = (name, time.monotonic())
            return str(name) if values.output else ""  # target rules have none
        if event == "JOB_FINISHED":
            if values.job_id not in self._begun:
                return ""
            name, began = self._begun.pop(values.job_id)
            self._num_done += 1
            return f"{name} done in {time.monotonic() - began:.0f} s ({self._num_done} of {self._num_jobs})"
        if event in _HIDDEN_EVENTS or record.getMessage().startswith(_HIDDEN):
            return ""
        return None


def configure_output(settings: Any | None) -> None:
    """Make the terminal output brief, and set the environment variable for `logged` accordingly.

    settings: Snakemake's output settings; None for a module or a submitted job.
    """
    os.environ[VARIABLE] = "1" if settings is not None and use_brief_output(settings) else ""


def use_brief_output(settings: Any) -> bool:
    """Make the terminal output brief and return True; only return False for a dry run, --verbose or another logger.

    settings: Snakemake's output settings.
    """
    logger = logging.getLogger("snakemake.logging")
    handlers = [handler for handler in logger.handlers if handler.name == "DefaultStreamHandler"]
    if settings.dryrun or settings.verbose or not handlers:
        return False
    (full,) = handlers
    logger.removeHandler(full)
    logger.addHandler(BriefHandler(full))  # type: ignore[arg-type]
    return True


def name_runs(studies: Iterable[StudyPlan]) -> None:
    """Print the variant and the seed after the name of each run of a study, which ends with a digest."""
    for handler in logging.getLogger("snakemake.logging").handlers:
        if isinstance(handler, BriefHandler):
            for study in studies:
                handler.titles |= study.titles
