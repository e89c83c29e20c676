"""Compare measured metrics with published ones: is the published value in the interval, and how do protocols differ?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from image_diffusion.core.config.base import Config


class PublishedResult(Config):
    """Result that was published for the same kind of model."""

    metric: str
    """Name of the metric as used here: fid, inception_score, bits_per_dim."""
    value: float
    """Published value."""
    source: str = Field(min_length=1)
    """Source of the value."""
    differences: tuple[str, ...] = ()
    """Differences between the published protocol and this one, a sentence each."""


def compare_with_published(
    cited: Sequence[PublishedResult], entries: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each published value with the measured one: {"metric", "value", "source", "differences", "ours",
    "interval", "n", "inside"}, plain data; the last four are null without a value to compare.

    The interval in metrics.json is centred on the debiased value. A published value includes the bias of its number of
    samples, so the interval is shifted to our value with its bias. An unreliable value (`doubt`) is not compared.
    """
    return [_compared(result, entries.get(result.metric, {})) for result in cited]


def _compared(cited: PublishedResult, entry: Mapping[str, Any]) -> dict[str, Any]:
    published = {"metric": cited.metric, "value": cited.value, "source": cited.source}
    comparison: dict[str, Any] = {**published, "differences": list(cited.differences)}
    ours = None if entry.get("doubt") else entry.get("value")
    interval = entry.get("interval") if ours is not None else None
    if interval is not None:
        debiased = entry.get("debiased")
        moved = 0.0 if debiased is None else ours - debiased
        interval = [bound + moved for bound in interval]
    inside = None if interval is None else interval[0] <= cited.value <= interval[1]
    return comparison | {"ours": ours, "interval": interval, "n": entry.get("n"), "inside": inside}
