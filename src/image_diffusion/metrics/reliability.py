"""Reasons to doubt a number: a classifier near chance, or a distance that does not distinguish samples from real
images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.metrics.features.base import Detector

LEAST_SKILL = 0.1
"""Minimum skill of a classifier, at the lower end of its 95 % interval: the share of a guess's errors that it avoids.
Our choice: an accuracy of 0.145 for ten classes, 0.55 for two."""

DISTANCES = ("fd", "fd_infinity", "spatial_fd", "kd", "mind", "cmmd", "class_fd")
"""Metrics of the distance between samples and real images, in which samples cannot be better than real images."""


def judge_doubt(description: Mapping[str, Any]) -> str | None:
    """Return the reason why the data set's own classifier is unreliable; None if it is reliable.

    description: detector.json. Its skill is (accuracy - chance) / (1 - chance), Cohen's kappa (1960) against always
    naming the most common answer; its interval is Wilson's (1927), over the held-out images.
    """
    from scipy.stats import binomtest  # imported here, because it slows the start of a stage

    n, accuracy, chance = description["num_held_out"], description["accuracy"], description["chance"]
    low = float(binomtest(round(accuracy * n), n).proportion_ci(method="wilson").low)
    if low >= chance + LEAST_SKILL * (1 - chance):
        return None
    own = "classes" if description["labels"] == "classes" else "images"
    return (
        f"this data set is too small to judge by its own {own}: the classifier is right for {accuracy:.0%} of {n:,} "
        f"held-out images, and a guess for {chance:.0%}. More images, or another of evaluate.detectors, would decide"
    )


def doubts_of(detectors: Sequence[Detector]) -> dict[str, Any]:
    """Return the doubts about the detectors for metrics.json: of the first, which gives the headline, and of all."""
    return {
        "doubt": detectors[0].doubt,
        "doubts": [detector.doubt for detector in detectors if detector.doubt is not None],
    }


def floor_doubt(name: str, same_size: Estimate, floor: Estimate) -> str | None:
    """Return the reason why a distance does not distinguish samples from real images; None if it does, or for other
    metrics.

    same_size, floor: estimates on equal numbers of samples and real images. If both have debiased values, these are
    used.
    """
    if name not in DISTANCES:
        return None
    debiased = same_size.debiased is not None and floor.debiased is not None
    sampled, real = (estimate.debiased if debiased else estimate.value for estimate in (same_size, floor))
    highest = floor.interval[1] if floor.interval is not None else real
    if sampled is None or highest is None or sampled > highest:
        return None
    between = f" [{floor.interval[0]:.4g}, {floor.interval[1]:.4g}]" if floor.interval is not None else ""
    return (
        f"{floor.n:,} real images score {real:.4g}{between}, as many samples {sampled:.4g}: "
        "this many do not tell the samples from real images"
    )
