"""Metrics that the run of a training shows: a readable number without duplicates.

The journal has all metrics, and the run of `evaluate` all of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from image_diffusion.core.journal.reader import Point

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
