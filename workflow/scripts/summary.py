#!/usr/bin/env python3
"""All experiments in one table: a page for the report, and lines for the terminal.

python workflow/scripts/summary.py --results results --benchmarks benchmarks --experiments a b --output summary.html
"""

from __future__ import annotations

import argparse
import csv
import html
from pathlib import Path

from report import STYLE, picture, rows

from image_diffusion.core import command
from image_diffusion.core.files import read_json, write_page

HEADS = ["experiment", "system", "data", "steps", "metric", "value", "95 % interval", "real images", "training"]


def line(name: str, results: Path, benchmarks: Path) -> list[object]:
    """What is shown of an experiment; lower is better for the metric."""
    folder = results / name
    plan, model = read_json(folder / "config" / "plan.json"), read_json(folder / "train" / "model.json")
    measured = read_json(folder / "metrics.json")["metrics"].get(plan["headline"], {})
    interval = " to ".join(f"{bound:.4g}" for bound in measured.get("interval") or [])
    found = [name, plan["system"], plan["dataset"], model["step"], plan["headline"]]
    if measured.get("doubt"):
        return [*found, f"no headline: {measured['doubt']}", "", None, trained_for(benchmarks / name)]
    return [*found, measured.get("value"), interval, measured.get("floor"), trained_for(benchmarks / name)]


def trained_for(benchmarks: Path) -> str:
    """Hours, minutes and seconds of the last start of training."""
    path = benchmarks / "train.tsv"
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", newline="") as file:
        return [each["h:m:s"] for each in csv.DictReader(file, delimiter="\t")][-1]


def page(lines: list[list[object]], results: Path) -> str:
    """The table, and under it what each experiment draws."""
    parts = [rows(HEADS, lines)]
    for name in (str(line[0]) for line in lines):
        drawn = [*picture(results / name / "samples" / "grid.png", name)]
        parts += [f"<h2>{html.escape(name)}</h2>", *drawn] if drawn else []
    head = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Experiments</title>\n'
    return f"{head}<style>{STYLE}</style>\n" + "<h1>Experiments</h1>\n" + "\n".join(parts) + "\n</html>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--experiments", nargs="+", required=True, help="names")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    lines = [line(name, arguments.results, arguments.benchmarks) for name in arguments.experiments]
    write_page(arguments.output, page(lines, arguments.results))
    for name, system, data, steps, metric, value, interval, *_ in lines:
        shown = "not measured" if value is None else str(value)
        if isinstance(value, float):
            shown = f"{metric} {value:.4g}" + (f" [{interval}]" if interval else "")
        print(f"{name}: {system} on {data}, {steps:,} steps, {shown}; {arguments.results / str(name) / 'report'}")


if __name__ == "__main__":
    command.run(main)
