#!/usr/bin/env python3
"""A study: variants of an experiment, compared -> index.html, study.csv and study.md in the study's folder.

python workflow/scripts/study.py --study results/studies/digits --results results --benchmarks benchmarks

Runs that failed, or have not been made, are shown as that. Nothing is written before the first has been. With
--partial there is no study.md: Snakemake makes the page again, as of any study of which a file is missing.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pages import render, source_of, time_of_training

from image_diffusion.core.files.atomic import read_json, write_page, write_text
from image_diffusion.core.journal.reader import read_journal
from image_diffusion.core.process import command
from image_diffusion.core.texts import table
from image_diffusion.metrics.distances.jackknife import jackknife_deviation
from image_diffusion.metrics.study_statistics import (
    Difference,
    Level,
    Measured,
    differences,
    level,
)

METHOD = (
    "Each seed trains its own weights and makes its own images. Two 95 % intervals of the mean, which is geometric for "
    "distances: over seeds, what other seeds would have changed (Student's t); over samples, what other images of the "
    "same weights would have."
)
NO_INTERVAL = (
    " The interval over samples is empty where a run has no interval of its own; the note in its metrics.json says why."
)
LEFT_OUT = " Runs without the metric, or whose judge is unreliable, are left out: {}."
DIFFERENCES = (
    " Differences are from the base, with 95 % intervals over {over}; distances are compared as ratios. {how}Of a "
    "hundred changes that do nothing, about five are called better or worse by chance."
)
MODERATED = "The spread of a variant is drawn towards that of all (Smyth 2004), and the interval is Welch's. "
NOT_MADE = "not made yet"
HEADS = ["metric", "variant", "mean", "95 % over seeds", "95 % over samples", "against the base", "verdict"]
COSTS = {"operations": ("operations a run", ".3g"), "cpu_s": ("CPU s of training", ".0f")}
COSTS |= {"images_per_s": ("images/s", ".0f")}


@dataclass
class Run:
    """Results of one run. failed: the reason why there are none."""

    name: str
    seed: int
    metrics: dict[str, Measured] = field(default_factory=dict)
    steps: int | None = None
    operations: float | None = None
    cpu_s: float | None = None
    images_per_s: float | None = None
    failed: str | None = None


@dataclass
class Variant:
    """One change, or the base."""

    name: str
    source: str | None
    changes: dict[str, Any]
    runs: list[Run]

    def measured(self, metric: str) -> list[Measured]:
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def mean(self, quantity: str) -> float | None:
        """Mean over the runs of steps, operations, seconds or images a second."""
        values = [value for run in self.runs if (value := getattr(run, quantity)) is not None]
        return statistics.fmean(values) if values else None

    @property
    def made(self) -> list[Run]:
        """The runs that have results."""
        return [run for run in self.runs if run.failed is None]

    @property
    def failures(self) -> list[str]:
        """A line for each run that failed."""
        runs = (run for run in self.runs if run.failed not in (None, NOT_MADE))
        return [f"{self.name}, seed {run.seed}: {run.failed} ({run.name})" for run in runs]


@dataclass
class Line:
    """One metric of one variant, as every table shows it."""

    metric: str
    variant: Variant
    level: Level | None
    difference: Difference | None

    def cells(self) -> list[str]:
        """Return the text under each of HEADS."""
        difference, own = self.difference, self.level
        texts = [""] * 5
        if own is not None:
            texts[0] = as_text(self.metric, own.value)
            for place, bounds in enumerate((own.over_seeds, own.over_samples), start=1):
                texts[place] = " to ".join(as_text(self.metric, end) for end in bounds or ())
        if difference is not None:
            shares = self.metric.endswith("agreement")
            scale, form = (100, "+.1f") if shares or difference.is_ratio else (1, "+.3g")
            value, *ends = (f"{scale * end:{form}}" for end in (difference.value, *(difference.interval or ())))
            unit = " points" if shares else " %" if scale == 100 else ""
            texts[3] = f"{value}{unit}" + (f" [{', '.join(ends)}]" if ends else "")
            texts[4] = difference.verdict or ""
        return [self.metric, self.variant.name, *texts]


def as_text(metric: str, value: float) -> str:
    return f"{100 * value:.1f} %" if metric.endswith("agreement") else f"{value:.4g}"


def read_run(name: str, seed: int, results: Path, benchmarks: Path) -> Run:
    """Return the results of a run, as far as there are any."""
    run, folder = Run(name, seed), results / name
    try:
        judged = read_json(folder / "metrics.json")
        entries, unreliable = judged["metrics"], judged.get("doubts", ())
        model = read_json(folder / "train" / "model.json")
    except (ValueError, KeyError):
        run.failed = failure(name)
        return run
    for metric, entry in entries.items():
        if entry["value"] is not None and (entry.get("doubt") is None or entry["doubt"] not in unreliable):
            run.metrics[metric] = Measured(entry["value"], jackknife_deviation(entry["interval"]))
    run.steps = model["step"]
    history = read_journal(folder / "journal" / "train")
    if history is not None:
        rates = dict(zip(*history.series("speed/examples_per_second"), strict=True))
        flops = dict(zip(*history.series("speed/tflops"), strict=True))
        run.images_per_s = statistics.median(rates.values()) if rates else None
        operations = [flops[step] * 1e12 / rates[step] for step in flops if rates.get(step)]
        run.operations = round(statistics.median(operations)) * model["examples_seen"] if operations else None
    seconds = time_of_training(folder, benchmarks).get("cpu_time", "")
    run.cpu_s = float(seconds) if seconds.replace(".", "", 1).isdigit() else None
    return run


def failure(name: str) -> str:
    """Return the line that a run failed with, of the stage that came last."""
    for stage in ("evaluate", "sample", "train"):
        path = Path("logs", name, f"{stage}.log")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            return f"{stage}: {errors[-1].removeprefix('error: ')}"
    return NOT_MADE


def metrics_of(plan: Mapping[str, Any], variants: Sequence[Variant], results: Path) -> list[str]:
    """Return the metrics that the study names, or the agreement of labels and the headline; of a base alone, all."""
    measured = dict.fromkeys(metric for variant in variants for run in variant.runs for metric in run.metrics)
    if plan["metrics"]:
        return list(plan["metrics"])
    if len(variants) == 1:
        return list(measured)
    headline = read_json(results / plan["variants"][0]["runs"][0] / "config" / "plan.json")["headline"]
    return [name for name in measured if name.endswith("agreement")] + [name for name in measured if name == headline]


def compared(variants: Sequence[Variant], metrics: Sequence[str]) -> list[Line]:
    """Return the lines of the table: for each metric the base, and the variants with their differences from it."""
    base, *others = variants
    lines = []
    for metric in metrics:
        apart = differences(
            metric, base.measured(metric), {variant.name: variant.measured(metric) for variant in others}
        )
        for variant in variants:
            runs = variant.measured(metric)
            lines.append(Line(metric, variant, level(metric, runs) if runs else None, apart.get(variant.name)))
    return lines


def method(lines: Sequence[Line], seeds: Sequence[int]) -> str:
    """Return how the intervals were made."""
    over = {line.difference.over for line in lines if line.difference is not None}
    is_empty = any(line.level is not None and line.level.over_samples is None for line in lines)
    fewer = [
        f"{line.metric} of {line.variant.name} is over {measured} of {made} runs"
        for line in lines
        if (measured := len(line.variant.measured(line.metric))) < (made := len(line.variant.made))
    ]
    levels = METHOD + (NO_INTERVAL if is_empty else "") + (LEFT_OUT.format("; ".join(fewer)) if fewer else "")
    if not over:
        return levels
    if len(seeds) > 1:
        return levels + DIFFERENCES.format(over="seeds and samples", how=MODERATED)
    noise = "samples only, as there is one seed" if over <= {"samples only", None} else "seeds and samples"
    return levels + DIFFERENCES.format(over=noise, how="")


def summary(plan: Mapping[str, Any], variants: Sequence[Variant]) -> str:
    """Return what was done, in a sentence."""
    budget = plan["budget"]
    steps = sorted({run.steps for variant in variants for run in variant.runs if run.steps is not None})
    length = "as long as the base says"
    if budget["steps"]:
        length = f"{budget['steps']:,} steps each"
    elif budget["operations"]:
        length = f"{budget['operations']:.3g} operations each"
    elif steps:
        length = f"{steps[0]:,} steps each" if len(steps) == 1 else f"of {steps[0]:,} to {steps[-1]:,} steps"
    changes = f"{len(variants) - 1} changes of " if len(variants) > 1 else ""
    runs = len({run.name for variant in variants for run in variant.runs})
    return f"{changes}{plan['base']}; seeds {', '.join(map(str, plan['seeds']))}; {runs} runs, {length}."


def costs(variant: Variant) -> list[str]:
    means = {quantity: variant.mean(quantity) for quantity in COSTS}
    return [f"{mean:{COSTS[quantity][1]}}" if mean is not None else "" for quantity, mean in means.items()]


def page(plan: Mapping[str, Any], variants: Sequence[Variant], lines: Sequence[Line], results: Path) -> str:
    """Return the HTML."""
    metrics = list(dict.fromkeys(line.metric for line in lines))
    ends = {metric: [0.0] for metric in metrics}
    for line in lines:
        if line.difference is not None and line.difference.interval is not None:
            ends[line.metric] += map(abs, line.difference.interval)
    samples = {}
    for variant in variants:
        grids = (source_of(results / run.name / "samples" / "grid.png") for run in variant.runs)
        if grid := next(filter(None, grids), None):
            samples[variant.name] = grid
    return render(
        "study.html",
        name=plan["study"],
        summary=summary(plan, variants),
        heads=HEADS if len(variants) > 1 else HEADS[:5],
        lines=[(line.cells(), bar_of(line.difference, max(ends[line.metric]))) for line in lines],
        method=method(lines, plan["seeds"]),
        variants=[
            (variant, [run.failed for run in variant.runs].count(NOT_MADE), costs(variant)) for variant in variants
        ],
        costs=[title for title, _ in COSTS.values()],
        samples=samples,
        runs={
            "heads": ["variant", "seed", "experiment", "steps", *metrics],
            "lines": [
                [variant.name, run.seed, run.name, run.steps or 0]
                + [as_text(name, run.metrics[name].value) if name in run.metrics else "" for name in metrics]
                for variant in variants
                for run in variant.runs
            ],
        },
    )


def bar_of(difference: Difference | None, reach: float) -> list[str]:
    """Return where a difference and the ends of its interval are drawn, from -reach to reach."""
    if difference is None or difference.interval is None or not reach:
        return []
    low, high = difference.interval
    return [f"{60 + 58 * position / reach:.1f}" for position in (low, difference.value, high)]


def markdown(plan: Mapping[str, Any], variants: Sequence[Variant], lines: Sequence[Line]) -> str:
    """Return the table for documents."""
    shown = len(HEADS) if len(variants) > 1 else 5
    align = [":--", ":--", *(["--:"] * 4), ":--"][:shown]
    measured = table(HEADS[:shown], [line.cells()[:shown] for line in lines], align)
    price = table(
        ["variant", *(title for title, _ in COSTS.values())],
        [[variant.name, *costs(variant)] for variant in variants],
        [":--", *(["--:"] * len(COSTS))],
    )
    out = [summary(plan, variants), "", measured, "", price, "", method(lines, plan["seeds"]), ""]
    out += [f"- failed: {line}" for variant in variants for line in variant.failures]
    return "\n".join(out).rstrip() + "\n"


def as_csv(lines: Sequence[Line], seeds: Sequence[int]) -> str:
    """Return the table with its numbers in full, and those of each seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["metric", "variant", "runs", "failed", "steps", "operations", "cpu_seconds", "images_per_second", "mean"]
    heads += [f"{noise}_{end}" for noise in ("seeds", "samples") for end in ("low", "high")]
    heads += ["difference", "difference_low", "difference_high", "verdict", *(f"seed_{seed}" for seed in seeds)]
    writer.writerow(heads)
    for line in lines:
        variant, own, difference = line.variant, line.level, line.difference
        cells: list[object] = [line.metric, variant.name, len(variant.runs), len(variant.failures)]
        cells += [variant.mean(quantity) for quantity in ("steps", "operations", "cpu_s", "images_per_s")]
        cells += [own.value, *(own.over_seeds or [None] * 2), *(own.over_samples or [None] * 2)] if own else [None] * 5
        cells += [difference.value, *(difference.interval or [None] * 2)] if difference else [None] * 3
        cells += [difference.verdict if difference else None]
        cells += [run.metrics[line.metric].value if line.metric in run.metrics else None for run in variant.runs]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def main() -> None:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--study", type=Path, required=True, help="folder: results/studies/<study>")
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--partial", action="store_true", help="a run has failed: leave out study.md")
    arguments = parser.parse_args()
    plan = read_json(arguments.study / "plan.json")
    variants = [
        Variant(
            variant["name"],
            variant["source"],
            variant["changes"],
            [
                read_run(name, seed, arguments.results, arguments.benchmarks)
                for name, seed in zip(variant["runs"], plan["seeds"], strict=True)
            ],
        )
        for variant in plan["variants"]
    ]
    if all(run.failed == NOT_MADE for variant in variants for run in variant.runs):
        return
    lines = compared(variants, metrics_of(plan, variants, arguments.results))
    document = arguments.study / "study.md"
    if arguments.partial:
        document.unlink(missing_ok=True)
    else:
        write_text(document, markdown(plan, variants, lines))
    write_text(arguments.study / "study.csv", as_csv(lines, plan["seeds"]))
    write_page(arguments.study / "index.html", page(plan, variants, lines, arguments.results))
    for line in lines:
        print("  ".join(filter(None, line.cells())))
    for message in (message for variant in variants for message in variant.failures):
        print(f"failed: {message}")
    print(f"study: {arguments.study / 'index.html'}")


if __name__ == "__main__":
    command.run(main)
