"""Terminal output of a run: the resources requested from a queue; one line at the start and one at the end of each job,
instead of Snakemake's blocks; at the end the metric of each experiment.

Snakemake's log file has the full output, and logs/ the output of the stages. `--verbose` prints all of it. The handler
of the terminal is replaced once the workflow is read, because Snakemake refuses a profile with a logger plugin that is
not installed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.process.secrets import hidden
from image_diffusion.workflow.damage import of_other_weights
from image_diffusion.workflow.plans import STUDIES_FOLDER, STUDY_PAGE, Plan, Plans, StudyPlan
from image_diffusion.workflow.resources import doubt_about, requested_gpus

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


HEADS = ("experiment", "metric", "value", "95 % interval", "report")


def outcome(plans: Plans, results: Path) -> str:
    """Return the table of metrics, one line per experiment, in the requested order, and the pages of studies; empty if
    no experiment has been evaluated.

    Unreadable files are left out; the stages that made them report them.
    """
    pages = [results / STUDIES_FOLDER / name / STUDY_PAGE for name in plans.studies]
    study_lines = [f"study: {page}" for page in pages if page.is_file()]
    if _is_study_alone(plans):
        return "\n".join(study_lines)
    lines = [line for plan in plans.by_name.values() if (line := _line(plan, results / plan.experiment)) is not None]
    if not lines:
        return "\n".join(study_lines)
    widths = [max(map(len, column)) for column in zip(HEADS, *lines, strict=True)]
    rows = [HEADS, tuple("-" * width for width in widths), *lines]
    return "\n".join(["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] + study_lines)


def places(plans: Plans, results: Path, uri: str) -> str:
    """Return a line for each existing result to open next: the samples, if only one experiment has any, the page of all
    experiments, unless only studies were requested, and MLflow. uri: of MLflow's store."""
    grids = [path for name in plans.by_name if (path := _grid(results / name)) is not None]
    pages = [path for path in [results / "summary.html"] if path.is_file() and not _is_study_alone(plans)]
    lines = [f"\n{path}" for path in (*(grids if len(grids) == 1 else []), *pages)]
    is_made = bool(lines) or any((results / STUDIES_FOLDER / name / STUDY_PAGE).is_file() for name in plans.studies)
    return "".join([*lines, f"\nmlflow ui --backend-store-uri {hidden(uri)}"]) if is_made else ""


def _grid(folder: Path) -> Path | None:
    """Return the picture of the samples of an experiment, if they are of its weights."""
    try:
        weights = read_json(folder / "samples" / "samples.json").get("weights_sha256")
    except (ValueError, AttributeError):
        weights = None
    path = folder / "samples" / "grid.png"
    return path if path.is_file() and not of_other_weights(folder, weights) else None


def _is_study_alone(plans: Plans) -> bool:
    return bool(plans.studies) and not plans.requested


def _line(plan: Plan, folder: Path) -> tuple[str, ...] | None:
    path, page = folder / "metrics.json", folder / "report" / "index.html"
    try:
        measured = read_json(path)
        metric = measured["metrics"].get(plan.headline) or {}
        weights = measured.get("protocol", {}).get("weights", {}).get("sha256")
    except (ValueError, KeyError, AttributeError):
        return None
    doubt = "not to rely on" if metric.get("doubt") else ""
    doubt = "of earlier weights" if of_other_weights(folder, weights) else doubt
    value, interval = (None, None) if doubt else (metric.get("value"), metric.get("interval"))
    return (
        plan.experiment,
        plan.headline,
        doubt or ("not measured" if value is None else f"{value:.4g}"),
        " to ".join(f"{bound:.4g}" for bound in interval) if interval else "none",
        str(page) if page.is_file() else "not made",
    )


_COLUMNS = {
    "nodes": "Nodes",
    "gpus": "GPUs",
    "cpus_per_task": "Cores",
    "mem_mb": "Memory (MB)",
    "runtime": "Time (min)",
    "slurm_partition": "Partition",
    "qos": "QOS",
}
_NONE = "-"


def request(jobs: Iterable[Any], executor: str = "slurm") -> str:
    """Return a table with one line for jobs of the same rule or group that request the same resources per node. jobs:
    the pending jobs of Snakemake. executor: Snakemake's; a warning is added if its request for GPUs is unknown.

    Empty if all jobs run on this machine.
    """
    lines = Counter(
        (_stages(job), *(_cell(job.resources, key) for key in _COLUMNS)) for job in jobs if not job.is_local
    )
    if not lines:
        return ""
    cells = zip(*((*line, str(number)) for line, number in sorted(lines.items())), strict=True)
    columns = zip(("Stage", *_COLUMNS.values(), "Jobs"), cells, strict=True)
    used = [(head, *column) for head, column in columns if {*column} != {_NONE}]
    widths = [max(map(len, column)) for column in used]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*used, strict=True)]
    doubt = doubt_about(executor) if any(head == _COLUMNS["gpus"] for head, *_ in used) else None
    return "\n".join(["Asked of the queue, for each job:", *rows, *([doubt] if doubt else [])])


def _cell(resources: Mapping[str, Any], key: str) -> str:
    return str((requested_gpus(resources) if key == "gpus" else resources.get(key)) or _NONE)


def _stages(job: Any) -> str:
    return ", ".join(sorted(job.rules)) if job.is_group() else str(job.rule.name)
