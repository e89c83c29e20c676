#!/usr/bin/env python3
"""A ledger: what each change is worth -> index.html, ledger.csv and ledger.md in the ledger's folder.

python workflow/scripts/ledger.py --ledger results/ledgers/digits --results results --benchmarks benchmarks

Runs that failed, or have not been made, are shown as that. Nothing is written before the first has been.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pages import render, source_of

from image_diffusion.core import command
from image_diffusion.core.files import read_json, write_page, write_text
from image_diffusion.core.history import read_journal
from image_diffusion.metrics import differences as compared
from image_diffusion.metrics.differences import Difference, Measured, differences, higher_is_better, is_ratio
from image_diffusion.metrics.intervals import jackknife_deviation

METHOD = (
    "Each seed trains its own weights and makes its own images. Differences are from the base, with 95 % intervals "
    "over {over}; distances are compared as ratios. {how}Of a hundred changes that do nothing, about five are called "
    "better or worse by chance."
)
HOW = (
    "What a row's seeds are apart is drawn towards what those of all rows are (Smyth 2004), and the interval is "
    "Welch's. "
)
ALONE = (
    "Each seed trains its own weights and makes its own images. Two 95 % intervals of the mean: over seeds, what other "
    "seeds would have changed (Student's t); over samples, what other images of the same weights would have."
)
NOT_MADE = "not made yet"


@dataclass
class Run:
    """What is known of one run. failed: why there is nothing, where that is so."""

    name: str
    seed: int
    metrics: dict[str, Measured] = field(default_factory=dict)
    steps: int | None = None
    operations: float | None = None
    cpu_s: float | None = None
    images_per_s: float | None = None
    failed: str | None = None


@dataclass
class Row:
    """One change, or the base."""

    name: str
    source: str | None
    changes: dict[str, Any]
    runs: list[Run]
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """How many of its runs have failed."""
        return sum(run.failed not in (None, NOT_MADE) for run in self.runs)

    def measured(self, metric: str) -> list[Measured]:
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def mean(self, what: str) -> float | None:
        """Of its runs: steps, operations, seconds or images a second."""
        values = [value for run in self.runs if (value := getattr(run, what)) is not None]
        return statistics.fmean(values) if values else None

    def value(self, metric: str) -> float | None:
        values = [each.value for each in self.measured(metric)]
        return statistics.fmean(values) if values else None


def read_run(name: str, seed: int, results: Path, benchmarks: Path) -> Run:
    """What there is of a run."""
    run, folder = Run(name, seed), results / name
    try:
        entries = read_json(folder / "metrics.json")["metrics"]
        model = read_json(folder / "train" / "model.json")
    except (ValueError, KeyError):
        run.failed = failure(name)
        return run
    for metric, entry in entries.items():
        if entry["value"] is not None and not entry.get("doubt"):
            run.metrics[metric] = Measured(entry["value"], jackknife_deviation(entry["interval"]))
    run.steps = model["step"]
    history = read_journal(folder / "journal" / "train")
    if history is not None:
        rates = dict(zip(*history.series("speed/examples_per_second"), strict=True))
        flops = dict(zip(*history.series("speed/tflops"), strict=True))
        run.images_per_s = statistics.median(rates.values()) if rates else None
        shared = [flops[step] * 1e12 / rates[step] for step in flops if rates.get(step)]
        run.operations = round(statistics.median(shared)) * model["examples_seen"] if shared else None
    path = benchmarks / name / "train.tsv"
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            seconds = [each["cpu_time"] for each in csv.DictReader(file, delimiter="\t")][-1]
        run.cpu_s = float(seconds) if seconds.replace(".", "", 1).isdigit() else None
    return run


def failure(name: str) -> str:
    """The line that a run failed with, of the stage that came last."""
    for stage in ("evaluate", "sample", "train"):
        path = Path("logs", name, f"{stage}.log")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        said = [line for line in lines if line.startswith("error: ")]
        if said:
            return f"{stage}: {said[-1].removeprefix('error: ')}"
    return NOT_MADE


def read_rows(plan: Mapping[str, Any], results: Path, benchmarks: Path) -> list[Row]:
    """All rows, the base first, with their differences from it."""
    rows = [
        Row(
            row["name"],
            row["source"],
            row["changes"],
            [read_run(name, seed, results, benchmarks) for name, seed in zip(row["runs"], plan["seeds"], strict=True)],
        )
        for row in plan["rows"]
    ]
    for metric in metrics_of(plan, rows, results):
        of_rows = {row.name: row.measured(metric) for row in rows[1:]}
        for name, difference in differences(metric, rows[0].measured(metric), of_rows).items():
            next(row for row in rows if row.name == name).differences[metric] = difference
    return rows


def metrics_of(plan: Mapping[str, Any], rows: Sequence[Row], results: Path) -> list[str]:
    """Those that the ledger names, or the agreement of labels and the headline."""
    known = dict.fromkeys(metric for row in rows for run in row.runs for metric in run.metrics)
    if plan["metrics"]:
        return list(plan["metrics"])
    if len(rows) == 1:
        return list(known)
    headline = read_json(results / plan["rows"][0]["runs"][0] / "config" / "plan.json")["headline"]
    return [*(name for name in known if name.endswith("agreement")), *([headline] if headline in known else [])]


def percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def level(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return percent(value) if metric.endswith("agreement") else f"{value:.4g}"


def apart(metric: str, difference: Difference | None) -> str:
    """The difference with its interval: in points of a share, in percent of a distance, or as it is."""
    if difference is None:
        return ""
    shares = metric.endswith("agreement")
    shown = [difference.value, *(difference.interval or ())]
    if shares or is_ratio(metric):
        unit = " points" if shares else " %"
        texts = [f"{100 * each:+.1f}" for each in shown]
    else:
        unit, texts = "", [f"{each:+.3g}" for each in shown]
    between = f" [{texts[1]}, {texts[2]}]" if difference.interval else ""
    return f"{texts[0]}{unit}{between}"


def title(metric: str) -> str:
    return f"{metric} ({'more' if higher_is_better(metric) else 'less'} is better)"


def table(rows: Sequence[Row], metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, for the page and for Markdown."""
    heads = ["change"]
    for metric in metrics:
        heads += [title(metric), "against the base", ""]
    heads += ["operations a run", "CPU s of training", "images/s"]
    lines = []
    for row in rows:
        cells = [row.name]
        for metric in metrics:
            difference = row.differences.get(metric)
            verdict = (difference.verdict if difference else None) or ""
            cells += [level(metric, row.value(metric)), apart(metric, difference), verdict]
        operations, cpu_s, rate = (row.mean(what) for what in ("operations", "cpu_s", "images_per_s"))
        cells += [f"{each:{form}}" if each is not None else "" for each, form in
                  ((operations, ".3g"), (cpu_s, ".0f"), (rate, ".0f"))]  # fmt: skip
        lines.append(cells)
    return heads, lines


def levels(row: Row, metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a row that is compared with none: a line for each metric."""
    lines = []
    for metric in metrics:
        if measured := row.measured(metric):
            found = compared.level(metric, measured)
            between = [
                f"{level(metric, each[0])} to {level(metric, each[1])}" if each else ""
                for each in (found.over_seeds, found.over_samples)
            ]
            lines.append([metric, level(metric, found.value), *between, str(len(measured))])
    return ["metric", "mean", "95 % over seeds", "95 % over samples", "seeds"], lines


def failures(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Each run that there is nothing of, by row and seed, and why."""
    for row in rows:
        for run in row.runs:
            if run.failed and run.failed != NOT_MADE:
                yield f"{row.name}, seed {run.seed}", f"{run.failed} ({run.name})"


def method(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """How the intervals were made."""
    if len(rows) == 1:
        return ALONE
    only = {each.over for row in rows for each in row.differences.values()} <= {"samples only", None}
    over = "samples only, as there is one seed" if only and len(seeds) == 1 else "seeds and samples"
    return METHOD.format(over=over, how="" if len(seeds) == 1 else HOW)


def page(plan: Mapping[str, Any], rows: Sequence[Row], metrics: Sequence[str], results: Path) -> str:
    """The HTML."""
    heads, lines = table(rows, metrics)
    reach = {
        metric: max(
            (
                abs(end)
                for row in rows
                if (found := row.differences.get(metric))
                for end in found.interval or (found.value,)
            ),
            default=0.0,
        )
        for metric in metrics
    }
    shown = []
    for row, cells in zip(rows, lines, strict=True):
        measured = [
            {"value": cells[1 + 3 * number], "apart": cells[2 + 3 * number], "verdict": cells[3 + 3 * number]}
            | {"drawn": drawn(row.differences.get(metric), reach[metric])}
            for number, metric in enumerate(metrics)
        ]
        about: dict[str, Any] = {"name": row.name, "changes": row.changes, "source": row.source, "runs": len(row.runs)}
        about |= {"failed": row.failed, "waiting": sum(run.failed == NOT_MADE for run in row.runs)}
        shown.append(about | {"metrics": measured, "costs": cells[-3:]})
    samples = {}
    for row in rows:
        grids = (source_of(results / run.name / "samples" / "grid.png") for run in row.runs)
        if grid := next(filter(None, grids), None):
            samples[row.name] = grid
    runs = [
        [row.name, run.seed, run.name, run.steps or 0]
        + [level(metric, run.metrics[metric].value if metric in run.metrics else None) for metric in metrics]
        for row in rows
        for run in row.runs
    ]
    return render(
        "ledger.html",
        name=plan["ledger"],
        summary=summary(plan, rows),
        heads=heads,
        rows=[] if len(rows) == 1 else shown,
        alone=dict(zip(("heads", "lines"), levels(rows[0], metrics), strict=True)) if len(rows) == 1 else None,
        method=method(rows, plan["seeds"]),
        failures=list(failures(rows)),
        samples=samples,
        runs={"heads": ["row", "seed", "experiment", "steps", *metrics], "lines": runs},
    )


def drawn(difference: Difference | None, reach: float) -> list[str]:
    """Where a difference and its interval are drawn, from -reach to reach."""
    if difference is None or difference.interval is None or not reach:
        return []
    low, high = difference.interval
    return [f"{60 + 58 * each / reach:.1f}" for each in (low, difference.value, high)]


def summary(plan: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What was done, in a sentence."""
    budget = plan["budget"]
    long = "as long as the base says"
    if budget["steps"]:
        long = f"{budget['steps']:,} steps each"
    elif budget["operations"]:
        long = f"{budget['operations']:.3g} operations each"
    count = len({run.name for row in rows for run in row.runs})
    seeds = ", ".join(map(str, plan["seeds"]))
    if len(rows) == 1:
        return f"{plan['base']} with seeds {seeds}; {count} runs, {long}."
    return f"{len(rows) - 1} changes of {plan['base']}, one at a time; seeds {seeds}; {count} runs, {long}."


def markdown(plan: Mapping[str, Any], rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """The table for documents."""
    heads, lines = levels(rows[0], metrics) if len(rows) == 1 else table(rows, metrics)
    numbers = ["---", *("--:" if head else ":--" for head in heads[1:])]
    out = [summary(plan, rows), "", *(f"| {' | '.join(cells)} |" for cells in (heads, numbers, *lines)), ""]
    out += [method(rows, plan["seeds"]), ""]
    out += [f"- failed: {who}: {why}" for who, why in failures(rows)]
    return "\n".join(out).rstrip() + "\n"


def as_csv(rows: Sequence[Row], metrics: Sequence[str], seeds: Sequence[int]) -> str:
    """A line for each row, numbers in full, with those of each seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["row", "runs", "failed", "steps", "operations", "cpu_seconds", "images_per_second"]
    for metric in metrics:
        heads += [f"{metric}{part}" for part in ("", "_difference", "_low", "_high", "_verdict")]
        heads += [f"{metric}_over_{noise}_{end}" for noise in ("seeds", "samples") for end in ("low", "high")]
        heads += [f"{metric}_seed_{seed}" for seed in seeds]
    writer.writerow(heads)
    for row in rows:
        cells: list[object] = [row.name, len(row.runs), row.failed]
        cells += [row.mean(what) for what in ("steps", "operations", "cpu_s", "images_per_s")]
        for metric in metrics:
            found = row.differences.get(metric)
            low, high = (found.interval if found else None) or (None, None)
            cells += [row.value(metric), found.value if found else None, low, high, found.verdict if found else None]
            measured = row.measured(metric)
            own = compared.level(metric, measured) if measured else None
            bounds = (own.over_seeds, own.over_samples) if own else (None, None)
            cells += [end for each in bounds for end in each or (None, None)]
            cells += [run.metrics[metric].value if metric in run.metrics else None for run in row.runs]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, required=True, help="folder: results/ledgers/<ledger>")
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    arguments = parser.parse_args()
    plan = read_json(arguments.ledger / "plan.json")
    rows = read_rows(plan, arguments.results, arguments.benchmarks)
    if all(run.failed == NOT_MADE for row in rows for run in row.runs):
        return
    metrics = metrics_of(plan, rows, arguments.results)
    write_text(arguments.ledger / "ledger.csv", as_csv(rows, metrics, plan["seeds"]))
    write_text(arguments.ledger / "ledger.md", markdown(plan, rows, metrics))
    write_page(arguments.ledger / "index.html", page(plan, rows, metrics, arguments.results))
    for cells in (levels(rows[0], metrics) if len(rows) == 1 else table(rows, metrics))[1]:
        print("  ".join(filter(None, cells)))
    for who, why in failures(rows):
        print(f"failed: {who}: {why}")
    print(f"ledger: {arguments.ledger / 'index.html'}")


if __name__ == "__main__":
    command.run(main)
