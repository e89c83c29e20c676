"""What Snakemake ends with: a table of the experiments that have been judged, with the metric each is ranked by."""

from __future__ import annotations

import shutil
from pathlib import Path

from image_diffusion.core.files import read_json
from image_diffusion.workflow.ledgers import FOLDER, PAGE
from image_diffusion.workflow.plans import Plan, Plans

HEADS = ("experiment", "metric", "value", "95 % interval", "report")


def outcome(plans: Plans, results: Path) -> str:
    """The table, one line an experiment, in the order in which they are asked for; empty where none has been judged. Of
    ledgers, and of the seeds of experiments, their pages.

    What cannot be read is left out: the stages that made it tell of it.
    """
    pages = [results / FOLDER / name / PAGE for name in plans.ledgers]
    told = [f"ledger: {page}" for page in pages if page.is_file()]
    if not plans.asked and plans.ledgers:
        return "\n".join(told)
    lines = [line for plan in plans.by_name.values() if (line := _line(plan, results / plan.experiment)) is not None]
    if not lines:
        return "\n".join(told)
    widths = [max(map(len, column)) for column in zip(HEADS, *lines, strict=True)]
    rows = [HEADS, tuple("-" * width for width in widths), *lines]
    return "\n".join(["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] + told)


def _line(plan: Plan, folder: Path) -> tuple[str, ...] | None:
    path, page = folder / "metrics.json", folder / "report" / "index.html"
    try:
        measured = read_json(path)["metrics"].get(plan.headline) or {}
    except (ValueError, KeyError, AttributeError):
        return None
    value, interval = measured.get("value"), measured.get("interval")
    if measured.get("doubt"):
        value, interval = None, None
    return (
        plan.experiment,
        plan.headline,
        "not to rely on" if measured.get("doubt") else "not measured" if value is None else f"{value:.4g}",
        " to ".join(f"{bound:.4g}" for bound in interval) if interval else "none",
        str(page) if page.is_file() else "not made",
    )


def remove_left_parts(plans: Plans, results: Path) -> None:
    """Remove parts of samples and of references, and marks of those of latents, that a killed command left, and that
    nobody joins: the experiment was changed back, or fewer GPUs went on. Only once everything of these experiments is
    made."""
    samples = [results / name / "samples" for name in plans.by_name]
    references = [
        folder for dataset in plans.datasets for folder in (results / "datasets" / dataset).glob("references/*/parts")
    ]
    for folder in (*samples, *references):
        for part in folder.glob("part-*-of-*.npz"):
            part.unlink(missing_ok=True)
        for halfway in folder.glob(".part-*-of-*.npz.halfway"):
            shutil.rmtree(halfway, ignore_errors=True)
    for dataset in plans.datasets:
        for mark in (results / "datasets" / dataset).glob("*/part-*-of-*.done"):
            mark.unlink(missing_ok=True)
