#!/usr/bin/env python3
"""All experiments that there are, as cards and in a table: a page, and lines for those that were asked for.

python workflow/scripts/summary.py --results results --benchmarks benchmarks --experiments a b --output summary.html
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from pages import interval, render, source_of, time_of_training

from image_diffusion.core.files.atomic import read_json, write_page
from image_diffusion.core.process import command
from image_diffusion.workflow.plans import used_weights

HEADS = ["experiment", "system", "data", "steps", "metric", "value", "95 % interval", "real images", "training"]


def line(name: str, results: Path, benchmarks: Path) -> dict[str, Any]:
    """Return the facts of an experiment that was made, as the page shows them; `metrics` are the values that are not
    doubted, with their intervals, as text. Raises ValueError or KeyError where its results are not whole."""
    folder = results / name
    plan, model = read_json(folder / "config" / "plan.json"), read_json(used_weights(folder) / "model.json")
    metrics = read_json(folder / "metrics.json")["metrics"]
    headline, time = metrics.get(plan["headline"], {}), time_of_training(folder, benchmarks)
    shown = {
        key: f"{entry['value']:.4g}" + (f" [{interval(entry['interval'])}]" if entry.get("interval") else "")
        for key, entry in metrics.items()
        if entry["value"] is not None and not entry.get("doubt")
    }
    return {
        "name": name,
        "system": plan["system"],
        "data": plan["dataset"],
        "steps": model["step"],
        "metric": plan["headline"],
        **{key: headline.get(key) for key in ("value", "interval", "n", "floor", "floor_n", "at_floor_n", "doubt")},
        "time": time.get("h:m:s", ""),
        "seconds": time.get("s", ""),
        "report": f"{name}/report/index.html",
        "grid": source_of(folder / "samples" / "grid.png"),
        "drawing": drawing(folder / "samples" / "samples.json"),
        "reconstructions": source_of(folder / "evaluation" / "reconstructions.png"),
        "metrics": shown,
    }


def drawing(samples: Path) -> str:
    """Return as JSON what decides which seeds and classes the images of grid.png have. samples: samples.json."""
    settings = read_json(samples)["settings"] if samples.is_file() else {}
    return json.dumps([settings.get(name) for name in ("first_seed", "seed", "labels")])


def others(results: Path, requested: list[str], studies: list[dict[str, Any]]) -> list[str]:
    """The names of experiments that were made before, without the runs of studies."""
    runs = {run for study in studies for run in study["runs"]}
    names = (path.parent.name for path in sorted(results.glob("*/metrics.json")))
    return [name for name in names if name not in runs and name not in requested]


def studies_of(results: Path) -> list[dict[str, Any]]:
    """The tables of studies: heads, lines, and the names of their runs."""
    studies = []
    for path in sorted((results / "studies").glob("*/study.csv")):
        plan = read_json(path.with_name("plan.json"))
        with path.open(encoding="utf-8", newline="") as file:
            heads, *lines = csv.reader(file)
        shown = [place for place, head in enumerate(heads) if not head.startswith("seed_")]
        studies.append({
            "name": path.parent.name,
            "page": f"studies/{path.parent.name}/index.html",
            "runs": {run for variant in plan["variants"] for run in variant["runs"]},
            "heads": [heads[place].replace("_", " ") for place in shown],
            "lines": [[_number(cells[place]) for place in shown] for cells in lines],
        })  # fmt: skip
    return studies


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--experiments", nargs="+", required=True, help="names of those that were asked for")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    requested = [line(name, arguments.results, arguments.benchmarks) for name in arguments.experiments]
    studies, before = studies_of(arguments.results), []
    for name in others(arguments.results, arguments.experiments, studies):
        try:
            before.append(line(name, arguments.results, arguments.benchmarks))
        except (ValueError, KeyError):  # being made again, or damaged: its own command tells
            continue
    experiments = [*requested, *before]
    measured = {experiment["name"]: experiment["metrics"] for experiment in experiments}
    write_page(
        arguments.output,
        render("summary.html", heads=HEADS, experiments=experiments, studies=studies, measured=measured),
    )
    for experiment in requested:
        name, metric = experiment["name"], experiment["metric"]
        shown = "not measured"
        if experiment["doubt"]:
            shown = f"no headline: {experiment['doubt']}"
        elif experiment["value"] is not None:
            shown = f"{metric} {experiment['metrics'][metric]}"
        print(
            f"{name}: {experiment['system']} on {experiment['data']}, {experiment['steps']:,} steps, "
            f"{shown}; {arguments.results / name / 'report'}"
        )


if __name__ == "__main__":
    command.run(main)
