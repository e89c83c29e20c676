#!/usr/bin/env python3
"""An experiment on one page: results/x -> results/x/report/index.html, with every picture inside the file.

python workflow/scripts/report.py --experiment results/x --data results/datasets/d-32/latents \
    --benchmarks benchmarks --output index.html
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from image_diffusion.core import command
from image_diffusion.core.files import digest, read_json, write_page
from image_diffusion.core.history import History, of_weights, read_journal
from image_diffusion.data.datasheet import body

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
img, svg { max-width: 100%; height: auto } img { image-rendering: pixelated }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 13px } summary { cursor: pointer }
"""


def page(experiment: Path, data: Path, benchmarks: Path) -> str:
    """The HTML of one experiment. data: folder of what it was trained on. benchmarks: of what Snakemake measured."""
    parts = [
        *metrics(experiment / "metrics.json"),
        *pictures(experiment),
        *sweeps(experiment / "sweep"),
        *training(experiment / "journal" / "train", experiment / "train" / "model.json"),
        *examples(data),
        *datasheet(data.parent / "datasheet"),
        *quarantine(data.parent / "crops" / "quarantine.csv"),
        *model(experiment / "train" / "model.json"),
        *runtimes(benchmarks / "datasets" / data.parent.name, benchmarks / experiment.name),
        *provenance(data.parent / "journal", experiment / "journal"),
        *configurations(experiment / "config", data.parent / "config"),
    ]
    name = html.escape(experiment.name)
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{name}</title>\n<style>{STYLE}</style>\n'
    return head + f"<h1>{name}</h1>\n" + "\n".join(parts) + "\n</html>\n"


QUARANTINED = 50
PICTURES = {
    "samples/grid.png": "Samples",
    "samples/steps.png": "From noise to image",
    "evaluation/classes.png": "Samples by class",
    "evaluation/confusion.png": "Confusion of classes",
    "evaluation/nearest.png": "Nearest training images",
    "evaluation/curve.png": "Quality of the previews",
    "evaluation/enlarged.png": "Held-out images: made small, enlarged bicubically and by the network, as they were",
    "evaluation/likelihood.png": "Bits per dimension by timestep",
    "evaluation/reconstructions.png": "Held-out images, and what is decoded from their latents",
    "evaluation/worst.png": "The worst reconstructions",
    "evaluation/codebook.png": "Use of the codebook",
    "evaluation/similarities.png": "Predicted and real image embeddings",
}


def pictures(experiment: Path) -> Iterator[str]:
    """What `sample` and `evaluate` drew."""
    of_judges = {
        f"evaluation/{path.name}": f"Nearest training images by {path.stem.removeprefix('nearest-')}"
        for path in sorted((experiment / "evaluation").glob("nearest-*.png"))
    }
    for name, title in (PICTURES | of_judges).items():
        if (experiment / name).is_file():
            yield f"<h2>{title}</h2>"
            yield from picture(experiment / name, title)


def picture(path: Path, title: str) -> Iterator[str]:
    """A PNG, inside the page."""
    if path.is_file():
        yield f'<img alt="{title}" src="{source_of(path)}">'


def source_of(path: Path) -> str:
    """A PNG as the source of an image, inside the page."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def sweeps(folder: Path) -> Iterator[str]:
    """The curves against one setting each, and where they are best."""
    for path in sorted(folder.glob("*/curve.json")):
        curve = read_json(path)
        title = f"Metrics against {curve['axis'].replace('_', ' ')}"
        apart = "" if curve["apart"] else ", not apart from all others"
        best = f"{html.escape(curve['headline'])} is lowest at {html.escape(curve['best'])}{apart}"
        doubt = f" Do not rely on it: {html.escape(curve['doubt'])}." if curve["doubt"] else ""
        yield f"<h2>{title}</h2>\n<p>{best}.{doubt}</p>"
        yield f'<img alt="{title}" src="{source_of(path.with_suffix(".png"))}">'


def metrics(path: Path) -> Iterator[str]:
    """A row for each metric: its value and interval, the same for as many real images, and how it was taken."""
    if not path.is_file():
        return
    result = read_json(path)
    yield "<h2>Metrics</h2>"
    if result.get("doubt"):
        yield f"<p><strong>No headline: {html.escape(result['doubt'])}.</strong></p>"
    heads = ["", "value", "95 % interval", "samples", "real images", "as many samples", "number", ""]
    lines = []
    for name, metric in result["metrics"].items():
        interval = " to ".join(f"{bound:.4g}" for bound in metric["interval"] or [])
        floor = [metric.get(key) for key in ("floor", "at_floor_n", "floor_n")]
        doubt = metric.get("doubt")
        note = metric["note"] if doubt in (None, result.get("doubt")) else doubt
        lines.append([name, metric["value"], interval, metric["n"], *floor, note])
    yield rows(heads, lines)
    yield from published(result.get("published", ()))
    if tested := result.get("self_test"):
        yield "<p>Self-test: real images beside as many others, and the same, blurred and faded.</p>"
        told = [[name, *map(each.get, ("half", "degraded", "n"))] for name, each in tested.items()]
        marks = ["right" if each["passed"] else "wrong" for each in tested.values()]
        yield rows(["", "real", "degraded", "images", "order"], [[*a, b] for a, b in zip(told, marks, strict=True)])
    yield f"<details><summary>protocol</summary>{table(flat(result['protocol']))}</details>"


def published(figures: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What others published beside ours."""
    lines = []
    for each in figures:
        interval = " to ".join(f"{bound:.4g}" for bound in each["interval"] or [])
        told = {True: "yes", False: "no", None: ""}[each["inside"]]
        lines.append([each["metric"], each["value"], each["ours"], interval, told, " ".join(each["differences"])])
        lines[-1][-1] += f" From: {each['source']}."
    if lines:
        yield "<h3>What others published</h3>"
        yield rows(["", "published", "ours", "95 % interval of ours", "inside", "what was different there"], lines)


def training(journal: Path, weights: Path) -> Iterator[str]:
    """The curves of training, one axis a metric. weights: the model.json of what it ended with."""
    history = read_journal(journal)
    if history is None:
        return
    if weights.is_file():
        history = of_weights(history, read_json(weights))
    keys = sorted({point.key for point in history.points if not point.key.startswith(("speed/", "system/"))})
    yield "<h2>Training</h2>"
    damaged = {"damaged or missing in the journal, left out": ", ".join(history.damaged)} if history.damaged else {}
    yield table({"attempts": len(history.starts), "status": history.status} | damaged)
    if keys:
        yield curves(history, keys)


def curves(history: History, keys: list[str]) -> str:
    """One small plot a metric, as SVG. The same history gives the same text."""
    columns = 2
    rows = -(-len(keys) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "report", "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(rows, columns, figsize=(10, 2.4 * rows), squeeze=False, layout="constrained")
        for axis in axes.flat[len(keys) :]:
            axis.set_axis_off()
        for axis, key in zip(axes.flat, keys, strict=False):
            steps, values = history.series(key)
            axis.plot(steps, values, marker="" if len(steps) > 1 else "o", linewidth=1)
            axis.set_title(key, fontsize=10, loc="left")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def examples(folder: Path) -> Iterator[str]:
    """What it was trained on."""
    if (folder / "manifest.json").is_file():
        manifest = read_json(folder / "manifest.json")
        yield "<h2>Data</h2>"
        for name, title in (("sheet.png", "Training images"), ("histograms.png", "Sizes and classes")):
            yield from picture(folder.parent / "crops" / name, title)
        yield table({key: value for key, value in manifest.items() if isinstance(value, str | int | float)})


def datasheet(folder: Path) -> Iterator[str]:
    """What was found in the images."""
    if (folder / "datasheet.json").is_file():
        yield "<h2>Data sheet</h2>"
        yield body(read_json(folder / "datasheet.json"), lambda name: source_of(folder / name))


def quarantine(path: Path) -> Iterator[str]:
    """The files that could not be used, and why; of many, the first."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        head, *bad = csv.reader(file)
    if bad:
        yield f"<h3>Quarantined: {len(bad):,} files</h3>"
        yield rows(head, bad[:QUARANTINED])
    else:
        yield "<p>No file was quarantined.</p>"


def runtimes(*folders: Path) -> Iterator[str]:
    """What Snakemake measured of every stage."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*.tsv")):
            with path.open(encoding="utf-8", newline="") as file:
                measured = list(csv.DictReader(file, delimiter="\t"))
            name = str(path.relative_to(folder).with_suffix(""))
            if name != "track":  # it may run after this page is made
                found += [[name, each["h:m:s"], each["max_rss"], each["mean_load"]] for each in measured]
    if found:
        yield "<h2>Runtimes</h2>"
        yield rows(["stage", "time", "most memory (MB)", "mean load (%)"], found)


def provenance(*folders: Path) -> Iterator[str]:
    """Where each stage's results come from: when it began, in how many starts, from which code, as which job."""
    found = []
    for stage in sorted(path for folder in folders for path in folder.glob("*") if path.is_dir()):
        history = read_journal(stage)
        if history is not None:
            began = datetime.fromtimestamp(history.starts[0] / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
            commit = history.tags.get("git_commit", "")[:12] + (" +" if history.tags.get("git_dirty") == "true" else "")
            job = history.tags.get("slurm_job_id", "")
            found.append([history.stage, began, str(len(history.starts)), commit, job, digest(history.params)[:12]])
    if found:
        yield "<h2>Provenance</h2>"
        yield rows(["stage", "began", "starts", "commit (+: with changes)", "Slurm job", "configuration"], found)


def model(path: Path) -> Iterator[str]:
    """What the weights are."""
    if path.is_file():
        yield "<h2>Model</h2>"
        yield table({key: value for key, value in read_json(path).items() if isinstance(value, str | int | float)})


def configurations(*folders: Path) -> Iterator[str]:
    """What every stage ran with."""
    yield "<h2>Configuration</h2>"
    for path in sorted(path for folder in folders for path in folder.glob("*.yaml")):
        text = html.escape(path.read_text(encoding="utf-8"))
        yield f"<details><summary>{html.escape(path.stem)}</summary><pre>{text}</pre></details>"


def table(rows: dict[str, Any]) -> str:
    """Two columns: a name, a value."""
    lines = (f"<tr><td>{html.escape(name)}</td>{cell(value)}</tr>" for name, value in rows.items())
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def rows(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table with a head."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = ("<tr>" + "".join(map(cell, line)) + "</tr>" for line in lines)
    return "<table>\n" + "\n".join([f"<tr>{heads}</tr>", *body]) + "\n</table>"


def cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        return f'<td class="number">{value:.5g}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested plain data with dotted names; lists of numbers, an interval for one, in one line."""
    if isinstance(data, dict):
        pairs: Iterable[tuple[str, Any]] = data.items()
    elif isinstance(data, list) and any(isinstance(each, dict | list) for each in data):
        pairs = ((str(number), each) for number, each in enumerate(data))
    elif isinstance(data, list):
        return {prefix: " to ".join(f"{each:.5g}" if isinstance(each, float) else str(each) for each in data)}
    else:
        return {prefix: data}
    rows: dict[str, Any] = {}
    for key, value in pairs:
        rows |= flat(value, f"{prefix}.{key}" if prefix else key)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, required=True, help="folder: results/<experiment>")
    parser.add_argument("--data", type=Path, required=True, help="folder of what the experiment was trained on")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    write_page(arguments.output, page(arguments.experiment, arguments.data, arguments.benchmarks))


if __name__ == "__main__":
    command.run(main)
