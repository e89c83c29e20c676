"""Curves of metrics and their plots: of the previews during training, which are evaluated like samples, and of a sweep
against the varied setting, with the best point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.checksums import read_listing
from image_diffusion.core.levels import Levels
from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.metrics.choice import Rule, choose, reading
from image_diffusion.metrics.compute import Reference, measure_preview
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.features.base import Detector, detect
from image_diffusion.metrics.samples import Samples, read_samples


def read_previews(
    folder: Path, classes: list[str], num_steps: int, levels: Levels | None = None
) -> tuple[dict[int, Samples], list[str]]:
    """Read the previews of a run by step (step-0000200.npz, …); empty if the folder is missing. Also return a sentence
    for each damaged or missing preview, which is skipped because only the training could sample it again.
    """
    names = {path.name for path in folder.glob("step-*.npz")}
    previews, left_out = dict[int, Samples](), list[str]()
    try:
        described = {name: sha256 for name, sha256 in read_listing(folder).items() if name.endswith(".npz")}
    except ValueError as error:
        described = {}
        left_out.append(f"A preview that is missing is not noticed: {error}")
    for name in sorted({*names, *described}):
        step, path = int(name[len("step-") : -len(".npz")]), folder / name
        if step > num_steps:
            continue
        try:
            if not path.is_file():
                raise ValueError(f"{path} is missing.")
            if name in described and sha256_file(path) != described[name]:
                raise ValueError(f"{path} is not what was drawn.")
            previews[step] = read_samples(path, classes, levels)
        except ValueError as error:
            left_out.append(f"The preview of step {step:,} is left out of the curve: {error}")
    return previews, left_out


def measure_previews(
    previews: Mapping[int, Samples],
    detector: Detector,
    reference_for: Callable[[Samples], Reference],
    classes: list[str],
    settings: EvaluateConfig,
) -> list[dict[str, Any]]:
    """Return for each step {"step", "num_samples", and the value of each metric of `measure_preview`}, plain data.

    reference_for: returns the reference of a preview, which depends on its labels alone.
    """
    curve, references = [], dict[bytes, Reference]()
    for step, samples in previews.items():
        if samples.num_samples <= settings.neighbours + 1:
            continue
        labels = torch.from_numpy(samples.labels) if classes and samples.has_labels else None
        features = detect(detector, samples, f"features of the preview of step {step:,}")
        key = samples.labels.tobytes()
        if key not in references:
            references[key] = reference_for(samples)
        estimates = measure_preview(features, labels, references[key], settings.neighbour_references)
        values = {detector.metric_name(name): estimate.value for name, estimate in estimates.items()}
        curve.append({"step": step, "num_samples": samples.num_samples, **values})
    return curve


def plot_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Draw each metric against the step, as PNG. curve: two points or more."""
    names = [name for name in curve[0] if name not in ("step", "num_samples")]
    figure = new_figure(4 * len(names), 3)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        values = [point[name] for point in curve]
        axis.plot([point["step"] for point in curve], values, marker="o", markersize=3)
        axis.set(title=name, xlabel="step")
        if min(values) >= 0:  # a kernel distance may be negative
            axis.set_ylim(bottom=0)
    save_figure(figure, path)


_SHOWN = (
    *("fid", "fd", "kid", "kd", "inception_score", "score", "precision", "recall", "coverage", "agreement", "copies"),
)


def sweep_curve(
    axis: str, points: Mapping[str, Mapping[str, Any]], headline: str, rule: Rule | None = None
) -> dict[str, Any]:
    """Return the curve over points, by value: the output of `evaluate` for each.

    Returns {"axis", "headline", "best", "points"}: a point is {"value", "metrics"} with the entries of metrics.json;
    best is the value with the lowest `headline`, compared by `reading`, the first in a tie; "apart", whether its
    interval lies below those of all others (None without intervals); and "doubt", why its metric is unreliable. rule:
    adds "choice", the result of `choose`.

    Raises ValueError for points that were measured differently, or a point without the headline.
    """
    protocols = {value: _compared(result["protocol"]) for value, result in points.items()}
    first = next(iter(protocols))
    for value, protocol in protocols.items():
        if protocol != protocols[first]:
            raise ValueError(
                f"The points {first} and {value} of sweep.{axis} were measured differently. Evaluate them again."
            )
    rows = [{"value": value, "metrics": result["metrics"]} for value, result in points.items()]
    for row in rows:
        if row["metrics"].get(headline, {}).get("value") is None:
            raise ValueError(f"The point {row['value']} of sweep.{axis} has no {headline}. Evaluate it again.")
    readings = reading([row["metrics"][headline] for row in rows])
    best = min(range(len(rows)), key=readings.__getitem__)
    intervals = [row["metrics"][headline]["interval"] for row in rows]
    apart = None
    if all(intervals):
        apart = all(intervals[best][1] < low for number, (low, _) in enumerate(intervals) if number != best)
    doubt = rows[best]["metrics"][headline].get("doubt")
    summary = {"best": rows[best]["value"], "apart": apart, "doubt": doubt}
    if rule is not None:
        summary["choice"] = choose(rule, rows, headline)
    return {"axis": axis, "headline": headline, **summary, "points": rows}


def plot_sweep(curve: Mapping[str, Any], path: Path) -> None:
    """Plot metrics against the varied setting as PNG, with 95 % intervals, marking the best or the chosen point."""
    rows = curve["points"]
    shared = [name for name in rows[0]["metrics"] if all(_drawn(name, row["metrics"].get(name)) for row in rows)]
    names = [curve["headline"], *(name for name in shared if name != curve["headline"])]
    columns = min(3, len(names))
    figure = new_figure(4 * columns, 3 * -(-len(names) // columns))
    axes = figure.subplots(-(-len(names) // columns), columns, squeeze=False).flat
    labels = [row["value"] for row in rows]
    numeric = curve["axis"] not in ("sampler", "ema")  # rates cluster near 1, and raw is not a number
    positions = [float(label) for label in labels] if numeric else [float(number) for number in range(len(labels))]
    best = labels.index(str(curve["choice"]["step"]) if "choice" in curve else curve["best"])
    for axis, name in zip(axes, names, strict=False):
        entries = [row["metrics"][name] for row in rows]
        values = reading(entries)
        axis.plot(positions, values, marker="o", markersize=4, linewidth=1 if numeric else 0, color="#4878a8")
        for position, entry in zip(positions, entries, strict=True):
            if entry["interval"] is not None:
                axis.vlines(position, *entry["interval"], color="#4878a8", alpha=0.6)
        axis.plot(positions[best], values[best], marker="o", markersize=10, fillstyle="none", color="#c04030")
        debiased = all(entry["debiased"] is not None for entry in entries)
        axis.set_title(f"{name}, debiased" if debiased else name, fontsize=9)
        axis.set_xlabel(curve["axis"].replace("_", " "))
        if not numeric:
            axis.set_xticks(positions, labels, rotation=30)
    for axis in list(figure.axes)[len(names) :]:
        axis.set_axis_off()
    save_figure(figure, path)


def _drawn(name: str, entry: Mapping[str, Any] | None) -> bool:
    return entry is not None and entry["value"] is not None and any(name.endswith(suffix) for suffix in _SHOWN)


def _compared(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal for numbers to be compared."""
    return {name: protocol[name] for name in ("detectors", "reference", "settings", "num_samples")}
