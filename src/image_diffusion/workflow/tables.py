"""Tables that Snakemake prints: the resources requested from a queue, and at the end the metric of each experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.process.secrets import hidden
from image_diffusion.workflow.gpu_requests import doubt_about, requested_gpus
from image_diffusion.workflow.integrity.damage import of_other_weights
from image_diffusion.workflow.plans import Plan, Plans
from image_diffusion.workflow.studies import FOLDER, PAGE

HEADS = ("experiment", "metric", "value", "95 % interval", "report")


def outcome(plans: Plans, results: Path) -> str:
    """Return the table of metrics, one line per experiment, in the requested order, and the pages of studies; empty if
    no experiment has been evaluated.

    Unreadable files are left out; the stages that made them report them.
    """
    pages = [results / FOLDER / name / PAGE for name in plans.studies]
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
    is_made = bool(lines) or any((results / FOLDER / name / PAGE).is_file() for name in plans.studies)
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
    used = [0, *(place for place in range(1, 1 + len(_COLUMNS)) if any(line[place] != _NONE for line in lines))]
    head = ("Stage", *_COLUMNS.values())
    table = [[*(head[place] for place in used), "Jobs"]]
    table += [[*(line[place] for place in used), str(number)] for line, number in sorted(lines.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    uses_gpus = any(line[1 + list(_COLUMNS).index("gpus")] != _NONE for line in lines)
    doubt = doubt_about(executor) if uses_gpus else None
    return "\n".join(["Asked of the queue, for each job:", *rows, *([doubt] if doubt else [])])


def _cell(resources: Mapping[str, Any], key: str) -> str:
    return str((requested_gpus(resources) if key == "gpus" else resources.get(key)) or _NONE)


def _stages(job: Any) -> str:
    return ", ".join(sorted(job.rules)) if job.is_group() else str(job.rule.name)
