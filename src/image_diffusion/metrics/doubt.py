"""Numbers that must not be believed, and why: a judge that guesses, a floor that the samples do not stand out from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from image_diffusion.metrics.features import Detector
from image_diffusion.metrics.intervals import Estimate

LEAST_SKILL = 0.1
"""Of what a guess gets wrong, the share that a judge must get right, at the lower end of its 95 % interval. Our choice:
0.145 of ten classes, 0.55 of two."""

DISTANCES = ("fd", "fd_infinity", "spatial_fd", "kd", "mind", "cmmd", "class_fd")
"""The metrics that say how far samples are from real images: others are no nearer than real images are."""


def judge_doubt(description: Mapping[str, Any]) -> str | None:
    """Why a classifier of the data set's own images cannot judge; None: it can.

    description: detector.json. Its skill is (accuracy - chance) / (1 - chance), Cohen's kappa (1960) against always
    naming the most common answer; its interval is Wilson's (1927), of the held-out images.
    """
    from scipy.stats import binomtest  # here: loading it would slow the start of every stage

    n, accuracy, chance = description["num_held_out"], description["accuracy"], description["chance"]
    low = float(binomtest(round(accuracy * n), n).proportion_ci(method="wilson").low)
    if low >= chance + LEAST_SKILL * (1 - chance):
        return None
    own = "classes" if description["labels"] == "classes" else "images"
    return (
        f"this data set is too small to judge by its own {own}: the classifier is right for {accuracy:.0%} of {n:,} "
        f"held-out images, and a guess for {chance:.0%}. More images, or another of evaluate.detectors, would tell"
    )


def doubts_of(detectors: Sequence[Detector]) -> dict[str, Any]:
    """What metrics.json says of those that judged: the doubt about the first, which gives the headline, and all."""
    return {"doubt": detectors[0].doubt, "doubts": [each.doubt for each in detectors if each.doubt is not None]}


def floor_doubt(name: str, same_size: Estimate, floor: Estimate) -> str | None:
    """Why a distance does not tell samples from real images; None: it does, or it is no distance.

    same_size and floor: of as many samples and real images. Compared are the debiased values where both have one.
    """
    if name not in DISTANCES:
        return None
    debiased = same_size.debiased is not None and floor.debiased is not None
    made, real = (each.debiased if debiased else each.value for each in (same_size, floor))
    highest = floor.interval[1] if floor.interval is not None else real
    if made is None or highest is None or made > highest:
        return None
    between = f" [{floor.interval[0]:.4g}, {floor.interval[1]:.4g}]" if floor.interval is not None else ""
    return (
        f"{floor.n:,} real images score {real:.4g}{between}, as many samples {made:.4g}: "
        "this many do not tell the samples from real images"
    )
