#!/usr/bin/env python3
"""An experiment on one page: results/x -> results/x/report/index.html, with every picture inside the file.

python workflow/scripts/report.py --experiment results/x --data results/datasets/d-32/latents \
    --benchmarks benchmarks --output index.html
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from pages import benchmark, curve, real, render, source_of, strips, time_of_training

from image_diffusion.core.config.base import parse, read_yaml
from image_diffusion.core.files.atomic import digest, read_json, write_page
from image_diffusion.core.journal.metric_definitions import definition_of
from image_diffusion.core.journal.reader import History, history_for_weights, logged_stages, read_journal
from image_diffusion.core.process import command
from image_diffusion.data.quality.datasheet import body
from image_diffusion.tracking.run_summary import doubt_of, headline_of, sentence
from image_diffusion.training.config import TrainConfig
from image_diffusion.workflow.plans import used_weights

MOST_PROPOSALS = 2
MOST_COPIES = 0.03
STILL_BETTER = 0.1
"""Share by which the last preview is better than the one before, for a training that could go on."""
QUARANTINED = 50
CLASSES = "evaluation/classes.png"
MOST_CLASSES = 100
"""Rows that this picture has."""
PICTURES = {
    "samples/grid.png": "Samples",
    "samples/steps.png": "From noise to image",
    "samples/conditions.png": "Images that samples are made of, above the samples",
    CLASSES: "Samples by class",
    "evaluation/confusion.png": "Confusion of classes",
    "evaluation/nearest.png": "Nearest training images",
    "evaluation/curve.png": "Quality of the previews",
    "evaluation/paired.png": "Held-out images: what the network sees of them, what it makes of that, and as they were",
    "evaluation/enlarged.png": "Held-out images: made small, enlarged bicubically and by the network, as they were",
    "evaluation/likelihood.png": "Bits per dimension by timestep",
    "evaluation/reconstructions.png": "Held-out images, and what is decoded from their latents",
    "evaluation/worst.png": "The worst reconstructions",
    "evaluation/codebook.png": "Use of the codebook",
    "evaluation/similarities.png": "Predicted and real image embeddings",
}
NOTES = {
    "samples/steps.png": "The noise, and what the network predicts while it becomes an image. Each row is a seed.",
    "evaluation/nearest.png": "Each row: a sample and its nearest training images. The nearest samples come first.",
}
SECTIONS = {"train": "Loss", "validation": "Validation", "preview": "Previews", "speed": "Speed", "system": "Machine"}


def page(experiment: Path, data: Path, benchmarks: Path) -> str:
    """The HTML of one experiment. data: folder of what it was trained on. benchmarks: of what Snakemake measured."""
    judged = metrics(experiment / "metrics.json")
    described = used_weights(experiment) / "model.json"
    history = training(experiment / "journal" / "train", described)
    plan = read_json(experiment / "config" / "plan.json") if (experiment / "config" / "plan.json").is_file() else {}
    return render(
        "experiment.html",
        name=experiment.name,
        sentence=sentence(experiment, plan.get("dataset")).replace("`", ""),
        headline=headline_of(experiment, plan.get("headline", "")),
        doubt=doubt_of(experiment, plan.get("headline", "")) or (judged and judged["doubt"]),
        facts=facts(history, time_of_training(experiment, benchmarks).get("h:m:s")),
        command=f"snakemake --cores all {shlex.quote(experiment.name)}",
        real=source_of(data.parent / "crops" / "sheet.png"),
        comparisons=list(comparisons(judged)),
        proposals=list(proposals(experiment, judged, read_findings(data.parent / "datasheet")))[:MOST_PROPOSALS],
        pictures=list(pictures(experiment, data)),
        judged=judged,
        beside=beside(judged),
        sweeps=list(sweeps(experiment / "sweep")),
        training=told(history, described.is_file()),
        charts=charts(history),
        data=examples(data),
        datasheet=datasheet(data.parent / "datasheet"),
        quarantined=quarantine(data.parent / "crops" / "quarantine.csv"),
        model=plain(described),
        runtimes=runtimes(benchmarks / "datasets" / data.parent.name, benchmarks / experiment.name),
        provenance=provenance(data.parent / "journal", experiment / "journal"),
        configurations=configurations(plan),
    )


def comparisons(judged: dict[str, Any] | None) -> Iterator[str]:
    """A sentence for each metric that says how good the samples are, beside what real images have."""
    for name, entry in (judged or {"metrics": {}})["metrics"].items():
        definition = definition_of(name)
        if definition is None or entry["value"] is None or entry.get("doubt"):
            continue
        if name.endswith("agreement") and entry["floor"] is not None:
            yield (
                f"{entry['value']:.1%} of the images are recognised as the class that was requested; "
                f"real held-out images: {entry['floor']:.1%}."
            )
        elif name.endswith("_c2st") and entry["floor"] is not None:
            accuracy = entry["value"] if entry.get("at_floor_n") is None else entry["at_floor_n"]
            yield (
                f"A classifier separates them from real images with an accuracy of {accuracy:.0%}, where 50% is "
                f"chance; real held-out images: {entry['floor']:.0%}."
            )
        elif name == "mask_iou" and entry["floor"] is not None:
            yield (
                f"Their masks, as found by a classifier of pixels, overlap with the requested ones by "
                f"{entry['value']:.1%}; those of real held-out images: {entry['floor']:.1%}."
            )
        elif name == "copies":
            yield f"{entry['value']:.1%} are nearer to a training image than real images are; expected: 1.0%."


def proposals(
    experiment: Path, judged: dict[str, Any] | None, findings: Mapping[str, int]
) -> Iterator[tuple[str, str | None]]:
    """Return the changes that are likeliest to help, the most important first: a reason, and the line of YAML; None
    where no setting is changed.

    findings: how often the datasheet has each.
    """
    if judged is None:
        return
    path = experiment / "train" / "model.json"
    model: dict[str, Any] = read_json(path) if path.is_file() else {"step": 0, "system": {}}
    steps = model["step"]
    anew = " The training would start from scratch (docs/extend_training.md)." if is_anew(experiment) else ""
    metrics = judged["metrics"]
    copies = (metrics.get("copies") or {}).get("value") or 0
    if copies > MOST_COPIES:
        fewer = max(1, steps // 2)
        yield f"{copies:.0%} of the samples are close to a training image.{anew}", f"train: {{steps: {fewer}}}"
    if conflicts := findings.get("label conflict"):
        yield (
            (
                f"{conflicts} pairs of images that show the same picture are of two classes (see Datasheet). "
                "Correct the labels."
            ),
            None,
        )
    curve = judged["curve"]
    kernel = next((name for point in curve for name in point if name.endswith("_kd")), None)
    is_better = kernel and len(curve) > 1 and 0 < curve[-1][kernel] < (1 - STILL_BETTER) * curve[-2][kernel]
    if is_better and copies <= MOST_COPIES:
        yield f"The previews were still improving at the end.{anew}", f"train: {{steps: {2 * steps}}}"
    drops_labels = model["system"].get("objective", {}).get("label_drop_probability", 0) > 0
    if not (experiment / "sweep").is_dir() and judged["can_guide"] and drops_labels:
        yield "Other sampling settings were not tried.", "sweep: {guidance_scale: [1, 1.5, 2, 4]}"
    few = [entry["n"] for entry in metrics.values() if str(entry["note"]).startswith(("biased", "no interval"))]
    if few and (experiment / "config" / "sample.yaml").is_file():  # a codec draws no samples
        yield f"{min(few):,} samples are few for these metrics.", f"sample: {{num_samples: {10 * min(few)}}}"


def is_anew(experiment: Path) -> bool:
    """Return whether a training of another number of steps starts from scratch."""
    path = experiment / "config" / "train.yaml"
    if not path.is_file():
        return False
    config: TrainConfig = parse(TrainConfig, read_yaml(path)["train"], str(path))
    return "steps" in config.identity()


def read_findings(datasheet: Path) -> dict[str, int]:
    """How often each finding of a datasheet occurs."""
    path = datasheet / "datasheet.json"
    return {row["kind"]: row["count"] for row in read_json(path)["findings"]} if path.is_file() else {}


def facts(history: History | None, time: str | None) -> dict[str, object]:
    """Return the text of the card beside the headline. time: of the training, if it was measured whole."""
    values: dict[str, object] = {}
    if history is not None:
        power = history.series("system/gpu_power_usage_watts")[1]
        if power and history.ended and len(history.starts) == 1:  # the pauses between attempts take no energy
            watts = sum(power) / len(power)
            values["energy of one GPU"] = f"{watts * (history.ended - history.starts[0]) / 3.6e9:.3g} kWh"
    if time is not None:
        values["training time"] = time
    return values


def pictures(experiment: Path, data: Path) -> Iterator[dict[str, Any]]:
    """Return the pictures of `sample` and `evaluate`; of classes a strip each, with its name."""
    of_judges = {
        f"evaluation/{path.name}": f"Nearest training images by {path.stem.removeprefix('nearest-')}"
        for path in sorted((experiment / "evaluation").glob("nearest-*.png"))
    }
    for name, title in (PICTURES | of_judges).items():
        path = experiment / name
        if path.is_file():
            names = class_names(experiment, data) if name == CLASSES else []
            parts = list(zip(names, strips(path, len(names)), strict=True)) if names else []
            source = None if parts else source_of(path)
            yield {"title": title, "note": NOTES.get(name), "source": source, "strips": parts}


def class_names(experiment: Path, data: Path) -> list[str]:
    """Return the row of each class in the picture of classes; none where that is unknown."""
    samples, manifest = experiment / "samples" / "samples.npz", data / "manifest.json"
    if not samples.is_file() or not manifest.is_file():
        return []
    classes = read_json(manifest).get("classes") or []
    with np.load(samples) as arrays:
        if read_json(samples.with_suffix(".json"))["num_samples"] != len(arrays["arr_0"]):  # the first ones alone
            return []
        drawn = np.unique(arrays["arr_1"])[:MOST_CLASSES].tolist() if "arr_1" in arrays else []
    return [classes[label] for label in drawn] if all(label < len(classes) for label in drawn) else []


def metrics(path: Path) -> dict[str, Any] | None:
    """metrics.json, for the page: every entry with all that the table shows."""
    if not path.is_file():
        return None
    result = read_json(path)
    optional = dict.fromkeys(("floor", "at_floor_n", "floor_n", "interval"))
    entries = {}
    for name, entry in result["metrics"].items():
        doubt = entry.get("doubt")
        note = entry["note"] if doubt in (None, result.get("doubt")) else doubt
        entries[name] = optional | entry | {"note": note}
    return {
        "doubt": result.get("doubt"),
        "metrics": entries,
        "published": result.get("published", []),
        "self_test": result.get("self_test", {}),
        "curve": result.get("curve", []),
        "can_guide": can_guide(result["protocol"].get("samples") or {}),
        "protocol": flat(result["protocol"]),
    }


def can_guide(samples: Mapping[str, Any]) -> bool:
    """Return whether samples have a class or a prompt that guidance could leave out. samples: of the protocol."""
    settings = samples.get("settings", {})
    return settings.get("guidance") is not None and bool(samples.get("classes") or settings.get("prompts"))


def beside(judged: dict[str, Any] | None) -> dict[str, Any]:
    """A row for each metric that several detectors measured."""
    by_meaning: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, entry in (judged or {"metrics": {}})["metrics"].items():
        definition = definition_of(name)
        if definition is not None and entry.get("floor") is not None:
            by_meaning.setdefault(definition.names, []).append((name, entry))
    several = {names: entries for names, entries in by_meaning.items() if len(entries) > 1}
    most = max(map(len, several.values()), default=0)
    lines = [
        [names, *(f"{name}: {entry['value']:.4g} (real images {real(entry)})" for name, entry in entries)]
        + [""] * (most - len(entries))
        for names, entries in several.items()
    ]
    return {"heads": ["metric", *[""] * most], "rows": lines}


def sweeps(folder: Path) -> Iterator[dict[str, Any]]:
    """The curves against one setting each, and where they are best."""
    for path in sorted(folder.glob("*/curve.json")):
        curve = read_json(path)
        yield (
            {"choice": None}
            | curve
            | {"axis": curve["axis"].replace("_", " "), "source": source_of(path.with_suffix(".png"))}
        )


def training(journal: Path, weights: Path) -> History | None:
    """The history of training. weights: the model.json of what it ended with."""
    history = read_journal(journal)
    return history_for_weights(history, read_json(weights)) if history is not None and weights.is_file() else history


def told(history: History | None, is_trained: bool) -> dict[str, Any] | None:
    """Return the history in words. is_trained: True if there are weights, so that there was a journal."""
    if history is None:
        return {"incomplete": "the journal of the training is lost"} if is_trained else None
    damaged = {"damaged or missing in the journal, left out": ", ".join(history.damaged)} if history.damaged else {}
    incomplete = {"incomplete": history.loss} if history.loss else {}
    return {"attempts": len(history.starts), "status": history.status} | incomplete | damaged


def charts(history: History | None) -> dict[str, dict[str, Any]]:
    """The curves of training by section, those that one reads first at the top."""
    sections: dict[str, dict[str, Any]] = {title: {} for title in SECTIONS.values()}
    for key in sorted({point.key for point in history.points} if history is not None else ()):
        title = SECTIONS.get(key.partition("/")[0], "Others")
        sections.setdefault(title, {})[key] = curve(*history.series(key))  # type: ignore[union-attr]
    return {title: curves for title, curves in sections.items() if curves}


def examples(folder: Path) -> dict[str, Any] | None:
    """Return the pictures and the manifest of the training data; None without a manifest."""
    if not (folder / "manifest.json").is_file():
        return None
    shown = {"sheet.png": "Training images", "histograms.png": "Sizes and classes", "channels.png": "Numbers"}
    sources = {title: source_of(folder.parent / "crops" / name) for name, title in shown.items()}
    drawn = [{"title": title, "source": source} for title, source in sources.items() if source]
    return {"pictures": drawn, "manifest": plain(folder / "manifest.json")}


def datasheet(folder: Path) -> Markup | None:
    """Return the datasheet; None without one."""
    if not (folder / "datasheet.json").is_file():
        return None
    return Markup(body(read_json(folder / "datasheet.json"), lambda name: source_of(folder / name) or ""))


def quarantine(path: Path) -> dict[str, Any] | None:
    """The files that could not be used, and why; of many, the first."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        head, *bad = csv.reader(file)
    return {"heads": head, "count": len(bad), "lines": bad[:QUARANTINED]}


def runtimes(*folders: Path) -> list[list[str]]:
    """Return the measurements by Snakemake of every stage."""
    lines = []
    for folder in folders:
        for path in sorted(folder.rglob("*.tsv")):
            name = str(path.relative_to(folder).with_suffix(""))
            if name != "track":  # it may run after this page is made
                lines += [[name, row["h:m:s"], row["max_rss"], row["mean_load"]] for row in benchmark(path)]
    return lines


def provenance(*folders: Path) -> list[list[str]]:
    """Where each stage's results come from: when it began, in how many starts, from which code, as which job."""
    lines = []
    for stage in (path for folder in sorted(folders) for path in logged_stages(folder)):
        history = read_journal(stage)
        if history is not None:
            began = datetime.fromtimestamp(history.starts[0] / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
            commit = history.tags.get("git_commit", "")[:12] + (" +" if history.tags.get("git_dirty") == "true" else "")
            job = history.tags.get("slurm_job_id", "")
            lines.append([history.stage, began, str(len(history.starts)), commit, job, digest(history.params)[:12]])
    return lines


def plain(path: Path) -> dict[str, Any] | None:
    """The values of a JSON that are no lists."""
    if not path.is_file():
        return None
    return {key: value for key, value in read_json(path).items() if isinstance(value, str | int | float)}


def configurations(plan: Mapping[str, Any]) -> dict[str, list[tuple[str, bool]]]:
    """Return the configuration of every stage: lines, and for each whether it differs from the system's default."""
    paths = {stage: Path(path) for stage, path in plan.get("configs", {}).items()}
    changed = set(plan.get("beyond_defaults", ()))
    return {
        stage: list(marked(path.read_text(encoding="utf-8"), changed, ("data",) if stage == "crop" else ()))
        for stage, path in paths.items()
        if path.is_file()
    }


def marked(text: str, changed: set[str], prefix: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """The lines of a YAML of nested blocks, each with whether its key, or one above it, is among those changed. prefix:
    keys that stand above all."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, key = len(line) - len(line.lstrip(" ")), line.strip().partition(":")[0]
        if not line.strip().startswith("- "):
            above = [parent for parent in above if parent[0] < indent] + [(indent, key)]
        names = [*prefix, *(name for _, name in above)]
        yield line, any(".".join(names[: count + 1]) in changed for count in range(len(names)))


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested plain data with dotted names; lists of numbers, an interval for one, in one line."""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif isinstance(data, list) and any(isinstance(item, dict | list) for item in data):
        pairs = [(str(number), item) for number, item in enumerate(data)]
    elif isinstance(data, list):
        return {prefix: " to ".join(f"{item:.5g}" if isinstance(item, float) else str(item) for item in data)}
    else:
        return {prefix: data}
    rows: dict[str, Any] = {}
    for key, value in pairs:
        rows |= flat(value, f"{prefix}.{key}" if prefix else key)
    return rows


def main() -> None:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--experiment", type=Path, required=True, help="folder: results/<experiment>")
    parser.add_argument("--data", type=Path, required=True, help="folder of what the experiment was trained on")
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of Snakemake's benchmarks")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args()
    write_page(arguments.output, page(arguments.experiment, arguments.data, arguments.benchmarks))


if __name__ == "__main__":
    command.run(main)
