#!/usr/bin/env python3
"""All experiments that there are in one table: a page, and lines for the terminal for those that were asked for.

python workflow/scripts/summary.py --results results --benchmarks benchmarks --experiments a b --output summary.html
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pages import interval, render, source_of

from image_diffusion.core import command
from image_diffusion.core.files import read_json, write_page

HEADS = ["experiment", "system", "data", "steps", "metric", "value", "95 % interval", "real images", "training"]


@dataclass
class Line:
    """What is shown of an experiment. metrics: values that are not doubted, with their intervals, as
    text."""

    name: str
    system: str
    data: str
    steps: int
    metric: str
    value: float | None
    interval: list[float] | None
    floor: float | None
    doubt: str | None
    time: str
    report: str
    grid: str | None
    metrics: dict[str, str] = field(default_factory=dict)


def line(name: str, results: Path, benchmarks: Path) -> Line:
    """Of an experiment that was made. Raises ValueError or KeyError where there are no whole results of it."""
    folder = results / name
    plan, model = read_json(folder / "config" / "plan.json"), read_json(folder / "train" / "model.json")
    metrics = read_json(folder / "metrics.json")["metrics"]
    headline = metrics.get(plan["headline"], {})
    shown = {
        key: f"{entry['value']:.4g}" + (f" [{interval(entry['interval'])}]" if entry.get("interval") else "")
        for key, entry in metrics.items()
        if entry["value"] is not None and not entry.get("doubt")
    }
    return Line(
        name=name,
        system=plan["system"],
        data=plan["dataset"],
        steps=model["step"],
        metric=plan["headline"],
        value=headline.get("value"),
        interval=headline.get("interval"),
        floor=headline.get("floor"),
        doubt=headline.get("doubt"),
        time=trained_for(benchmarks / name),
        report=f"{name}/report/index.html",
        grid=source_of(folder / "samples" / "grid.png"),
        metrics=shown,
    )


def trained_for(benchmarks: Path) -> str:
    """Hours, minutes and seconds of the last start of training."""
    path = benchmarks / "train.tsv"
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", newline="") as file:
        return [each["h:m:s"] for each in csv.DictReader(file, delimiter="\t")][-1]


def others(results: Path, asked: list[str], ledgers: list[dict[str, Any]]) -> list[str]:
    """The names of experiments that were made before, without the runs of ledgers."""
    runs = {run for ledger in ledgers for run in ledger["runs"]}
    found = (path.parent.name for path in sorted(results.glob("*/metrics.json")))
    return [name for name in found if name not in runs and name not in asked]


def ledgers_of(results: Path) -> list[dict[str, Any]]:
    """The tables of ledgers: heads, lines, and the names of their runs."""
    found = []
    for path in sorted((results / "ledgers").glob("*/ledger.csv")):
        plan = read_json(path.with_name("plan.json"))
        with path.open(encoding="utf-8", newline="") as file:
            heads, *lines = csv.reader(file)
        kept = [place for place, head in enumerate(heads) if "_seed_" not in head and "_over_" not in head]
        found.append({
            "name": path.parent.name,
            "page": f"ledgers/{path.parent.name}/index.html",
            "runs": {run for row in plan["rows"] for run in row["runs"]},
            "heads": [heads[place].replace("_", " ") for place in kept],
            "lines": [[_number(cells[place]) for place in kept] for cells in lines],
        })  # fmt: skip
    return found


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--experiments", nargs="+", required=True, help="names of those that were asked for")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    asked = [line(name, arguments.results, arguments.benchmarks) for name in arguments.experiments]
    ledgers, before = ledgers_of(arguments.results), []
    for name in others(arguments.results, arguments.experiments, ledgers):
        try:
            before.append(line(name, arguments.results, arguments.benchmarks))
        except (ValueError, KeyError):  # being made again, or damaged: its own command tells
            continue
    experiments = [asdict(each) for each in (*asked, *before)]
    measured = {each["name"]: each["metrics"] for each in experiments}
    write_page(
        arguments.output,
        render("summary.html", heads=HEADS, experiments=experiments, ledgers=ledgers, measured=measured),
    )
    for each in asked:
        shown = "not measured"
        if each.doubt:
            shown = f"no headline: {each.doubt}"
        elif each.value is not None:
            shown = f"{each.metric} {each.metrics[each.metric]}"
        report = arguments.results / each.name / "report"
        print(f"{each.name}: {each.system} on {each.data}, {each.steps:,} steps, {shown}; {report}")


if __name__ == "__main__":
    command.run(main)
