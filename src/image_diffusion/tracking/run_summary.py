"""Summary that a run shows to people: a note at the top, and the metrics of a training, a readable number without
duplicates.

The note is a card of the run's contents, its quality, its comparison with other runs, and the commands that reproduce
it. The journal has all metrics, and the run of `evaluate` all of its own. This module does not use MLflow: it is made
from results and from the headlines of other runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.journal.reader import Point
from image_diffusion.workflow.plans import used_weights

_NAMED = 5  # maximum number of other runs in each relation


@dataclass(frozen=True)
class Headline:
    """The metric that an experiment is ranked by, lower is better. interval: of 95 %, if known."""

    metric: str
    value: float
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        between = f", 95 % interval {self.interval[0]:.4g} to {self.interval[1]:.4g}" if self.interval else ""
        return f"{self.metric} {self.value:.4g}{between}"


def headline_of(experiment: Path, metric: str) -> Headline | None:
    """Return the headline in a results folder, if it is of the weights in that folder and is reliable."""
    entry = _entry(experiment, metric)
    if entry is None or entry.get("doubt"):
        return None
    low_high = entry.get("interval")
    return Headline(metric, float(entry["value"]), (low_high[0], low_high[1]) if low_high else None)


def doubt_of(experiment: Path, metric: str) -> str | None:
    """Return why the headline in a results folder, of the weights in that folder, is unreliable; None if it is reliable
    or missing."""
    entry = _entry(experiment, metric)
    return entry.get("doubt") if entry is not None else None


def _entry(experiment: Path, metric: str) -> dict[str, Any] | None:
    """Return the entry of a metric that was measured with the weights in a results folder."""
    try:
        judged, model = read_json(experiment / "metrics.json"), read_json(used_weights(experiment) / "model.json")
        entry: dict[str, Any] = judged["metrics"][metric]
        is_current = judged["protocol"]["weights"]["sha256"] == model["sha256"]
        return entry if is_current and entry["value"] is not None else None
    except (ValueError, KeyError, TypeError):  # missing, or damaged, which its stage reports and repairs
        return None


def card(experiment: Path, data: str | None, metric: str, others: Iterable[tuple[str, Headline]]) -> str:
    """Return Markdown on the training in a results folder.

    data: the name of its data set. others: the headlines of other runs on the same data, by their names.
    """
    name, own = experiment.name, headline_of(experiment, metric)
    lines = [sentence(experiment, data), ""]
    if doubt := doubt_of(experiment, metric):
        lines.append(f"**No headline** by {metric}: {doubt}.")
    elif own is None:
        lines.append(f"**Not evaluated yet** by {metric}.")
    else:
        lines += [f"**{own}** (lower is better). {ranked(own, list(others))}"]
    lines += [
        "",
        f"Reproduce it with `snakemake --cores all {shlex.quote(name)}` where `config/experiments/{name}.yaml` lies.",
        "",
        f"Report: `{experiment / 'report' / 'index.html'}`. Samples, previews and curves are under Artifacts and Model "
        f"metrics; the configuration of each stage is the parameters.",
    ]
    return "\n".join(lines)


def ranked(own: Headline, others: Sequence[tuple[str, Headline]]) -> str:
    """Compare a headline with others: two with overlapping intervals cannot be distinguished; without intervals, noise
    is not mentioned."""
    if not others:
        return "No other run on this data has been evaluated by it."
    place = 1 + sum(headline.value < own.value for _, headline in others)
    relations: dict[str | None, list[str]] = {"better than": [], "within noise of": [], "worse than": [], None: []}
    for name, headline in sorted(others, key=lambda other: (other[1].value, other[0])):
        relations[_relation(own, headline)].append(f"{name} ({headline.value:.4g})")
    apart = [f"{relation} {_some(names)}" for relation, names in relations.items() if names and relation]
    if incomparable := relations[None]:
        apart.append(f"not comparable with {_some(incomparable)}, as an interval is missing")
    return f"Number {place} of {len(others) + 1} runs on this data: {'; '.join(apart)}."


def _relation(own: Headline, other: Headline) -> str | None:
    """Return the relation of two headlines; None where an interval is missing."""
    if own.interval is None or other.interval is None:
        return None
    if own.interval[1] < other.interval[0]:
        return "better than"
    return "worse than" if other.interval[1] < own.interval[0] else "within noise of"


def _some(names: Sequence[str]) -> str:
    shown, more = names[:_NAMED], len(names) - _NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def sentence(experiment: Path, data: str | None) -> str:
    """Describe the training in a sentence."""
    on = f" on {data}" if data else ""
    try:
        model = read_json(used_weights(experiment) / "model.json")
        system, step, examples = model["system"]["type"], int(model["step"]), int(model["examples_seen"])
    except (ValueError, KeyError, TypeError):
        return f"The training of `{experiment.name}`{on}, which has not ended."
    return f"`{experiment.name}`: a {system} trained{on} for {step:,} steps, {examples:,} examples."


_LEFT_OUT = re.compile(
    r"(?!train/loss_).+_q\d+"  # losses by quarter of the times, except the training's
    r"|speed/steps_per_second"  # examples per second divided by the batch
    r"|speed/tflops"  # the share of the peak is comparable between machines
    r"|speed/(median_share|slowest_process)"  # the slowest's share shows whether it matters
    r"|system/(process_cpu|memory_usage)_percentage"  # redundant with the machine's CPUs and this process's memory
)
_OF_EVALUATE = 3
"""Number of metrics of `evaluate` that a training shows, the headline first."""
_OF_SYNTHESIZE = ("utility.gain", "copies", "membership.auc")
"""Scores of `synthesize` that a training shows."""


def shown_points(points: Sequence[Point]) -> list[Point]:
    """Select the points logged by a training that its run shows. A metric with the same values as the loss of its
    section, such as the squared error if it is the loss, is left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if not _LEFT_OUT.fullmatch(point.key):
            series.setdefault(point.key, []).append((point.step, point.value))
    same = {key for key, values in series.items() if values == series.get(loss := _loss_of(key)) and key != loss}
    return [point for point in points if point.key in series and point.key not in same]


def measured(points: Sequence[Point], headline: str) -> list[Point]:
    """Select the points of `evaluate` and `synthesize`, named as in the parent run, that a training shows: the headline
    and a few others; for previews, only the headline."""
    named = dict.fromkeys(point.key for point in points if point.key.startswith("evaluate/"))
    first = sorted(named, key=lambda key: key != f"evaluate/{headline}")[:_OF_EVALUATE]
    shown_keys = {*first, *(f"synthesize/{name}" for name in _OF_SYNTHESIZE)}
    others = {point.key for point in points if point.key.startswith(("evaluate/", "synthesize/"))} - shown_keys
    return [
        point
        for point in points
        if point.key not in others and (not point.key.startswith("preview/") or point.key == f"preview/{headline}")
    ]


def scalars(points: Iterable[Point], headline: str) -> list[Point]:
    """Return single numbers for a table of runs that have ended: `final/`, the last value, and `best/`, the lowest, of
    the validation loss and of the headline, if these have several points. The last loss is at the largest step; the
    last headline is of the latest evaluation, possibly of weights of an earlier step. Each number is stored at the
    largest step and latest time of its curve, because MLflow's table shows the point of the largest step and, of
    several, the latest."""
    summaries = []
    by_key: dict[str, list[Point]] = {"validation/loss": [], f"evaluate/{headline}": []}
    for point in points:
        by_key.get(point.key, []).append(point)
    orders = (lambda point: (point.step, point.time)), (lambda point: (point.time, point.step))
    for name, series, order in zip(("validation_loss", headline), by_key.values(), orders, strict=True):
        numbers = [point for point in series if point.value == point.value]  # skips NaN
        if len(numbers) > 1:
            step, time = max(point.step for point in numbers), max(point.time for point in numbers)
            summaries.append(Point(f"final/{name}", max(numbers, key=order).value, step, time))
            summaries.append(Point(f"best/{name}", min(point.value for point in numbers), step, time))
    return summaries


def _loss_of(key: str) -> str:
    return f"{key.partition('/')[0]}/loss"
