"""Curve of a sweep: metrics against the varied setting, the best point, and the plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.metrics.choice import Rule, choose, reading

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
