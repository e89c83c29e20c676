"""Metrics that the run of a training shows: few enough to read, none twice.

The journal keeps them all, and the run of `evaluate` all that it has measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from image_diffusion.core.journal.reader import Point

_LEFT_OUT = re.compile(
    r"(?!train/loss_).+_q\d+"  # quarters of the times, of all but the training's loss
    r"|speed/steps_per_second"  # that of examples over the batch
    r"|speed/tflops"  # the share of the peak says it of any machine
    r"|speed/(median_share|slowest_process)"  # the slowest's share says whether to look for it
    r"|system/(process_cpu|memory_usage)_percentage"  # of what the machine's CPUs and this process's memory say
)
_OF_EVALUATE = 3
"""Metrics of `evaluate` that a training shows, the headline first."""
_OF_SYNTHESIZE = ("utility.gain", "copies", "membership.auc")
"""Scores of `synthesize` that a training shows."""


def shown(points: Sequence[Point]) -> list[Point]:
    """Select the points logged by a training that its run shows. A metric that repeats the loss of its section, value
    by value, such as the squared error where that is the loss, is left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if not _LEFT_OUT.fullmatch(point.key):
            series.setdefault(point.key, []).append((point.step, point.value))
    same = {key for key, values in series.items() if values == series.get(loss := _loss_of(key)) and key != loss}
    return [point for point in points if point.key in series and point.key not in same]


def measured(points: Sequence[Point], headline: str) -> list[Point]:
    """Select the points measured by `evaluate` and `synthesize`, by the names that their parent gives them, that a
    training shows: the headline and a few others, and of previews the headline alone."""
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
    """Return one number each for a table of runs that have ended: `final/` the last and `best/` the lowest of the loss
    of validation and of the headline, if they have more than one point to choose from. The last loss is that of the
    largest step, the last headline that of the latest evaluation, which may be of weights of an earlier step. Each has
    the largest step and the latest time of its curve: MLflow's table shows the point of the largest step, and of
    several the latest, so that this is the last one that was sent."""
    summaries = []
    by_key: dict[str, list[Point]] = {"validation/loss": [], f"evaluate/{headline}": []}
    for point in points:
        by_key.get(point.key, []).append(point)
    orders = (lambda point: (point.step, point.time)), (lambda point: (point.time, point.step))
    for name, series, order in zip(("validation_loss", headline), by_key.values(), orders, strict=True):
        numbers = [point for point in series if point.value == point.value]  # a NaN is no number
        if len(numbers) > 1:
            step, time = max(point.step for point in numbers), max(point.time for point in numbers)
            summaries.append(Point(f"final/{name}", max(numbers, key=order).value, step, time))
            summaries.append(Point(f"best/{name}", min(point.value for point in numbers), step, time))
    return summaries


def _loss_of(key: str) -> str:
    return f"{key.partition('/')[0]}/loss"
