"""Published figures beside what was measured here: inside its interval or not, and what else was different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from image_diffusion.core.config import Config


class Cited(Config):
    """A figure that others published of the same kind of model."""

    metric: str
    """What it is called here: fid, inception_score, bits_per_dim."""
    value: float
    """The figure."""
    source: str = Field(min_length=1)
    """Where it stands."""
    differences: tuple[str, ...] = ()
    """What was done differently there, a sentence each."""


def beside(cited: Sequence[Cited], entries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each figure with what was measured: {"metric", "value", "source", "differences", "ours", "interval", "n",
    "inside"}, plain data; the last four are null where there is nothing to compare.

    An interval stands in metrics.json around the debiased number. A published figure has the bias of its own number of
    samples, so the interval is moved here to lie around ours as it is published, with that bias. A number that must not
    be believed (`doubt`) is not compared.
    """
    return [_beside(each, entries.get(each.metric, {})) for each in cited]


def _beside(cited: Cited, entry: Mapping[str, Any]) -> dict[str, Any]:
    known = {"metric": cited.metric, "value": cited.value, "source": cited.source}
    found: dict[str, Any] = {**known, "differences": list(cited.differences)}
    ours = None if entry.get("doubt") else entry.get("value")
    interval = entry.get("interval") if ours is not None else None
    if interval is not None:
        debiased = entry.get("debiased")
        moved = 0.0 if debiased is None else ours - debiased
        interval = [bound + moved for bound in interval]
    inside = None if interval is None else interval[0] <= cited.value <= interval[1]
    return found | {"ours": ours, "interval": interval, "n": entry.get("n"), "inside": inside}
