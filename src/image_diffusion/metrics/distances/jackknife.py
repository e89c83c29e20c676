"""Intervals by the block jackknife (Quenouille 1949; Tukey 1958; Efron and Stein 1981).

The percentile bootstrap is unsuitable: resampling adds the 1/N bias of a Fréchet distance a second time, and its 95 %
interval covers the truth in 0 of 100 cases. Leaving out one block at a time estimates both bias and variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each

SMALLEST_BLOCK = 5


@dataclass(frozen=True)
class Estimate:
    """A statistic with its uncertainty. value: as the literature defines it. n: number of samples. debiased: without
    the bias of order 1/N, if it has one. interval: 95 %, around the debiased value; None for too few samples, which
    `note` explains.
    """

    value: float
    n: int
    debiased: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return an entry of metrics.json, without the floor (`compute.with_floor` adds it)."""
        return {
            "value": self.value,
            "debiased": self.debiased,
            "interval": list(self.interval) if self.interval else None,
            "n": self.n,
            "note": self.note,
            "floor": None,
            "floor_n": None,
            "at_floor_n": None,
            "ratio": None,
            "doubt": None,
        }


def jackknife(
    value: float,
    left_out: Sequence[float],
    n: int,
    low: float = -math.inf,
    high: float = math.inf,
    centre: Literal["debiased", "value"] = "debiased",
    reference_left_out: Sequence[float] = (),
) -> Estimate:
    """Return the estimate from a statistic and its B values, each with one block left out.

    debiased = B value - (B - 1) mean(left_out); variance = (B - 1) / B sum (left_out - mean)²; Student's t at B - 1.
    For a statistic of two samples, bias and variance of both sides are added (Arvesen 1969, "Jackknifing U-statistics",
    section 5): it then estimates the distance between the distributions, not from one to the other sample.

    low, high: bounds of the statistic. The debiased value is clipped to them, and the interval is centred on the
    clipped value: an estimate beyond a bound has the interval of an estimate on the bound (Mandelkern and Schultz 2000,
    J. Math. Phys. 41, 5701), which is never empty and has at least its nominal coverage. centre="value": centred on the
    value itself, for a statistic without bias, or with a bias that is not of order 1/N (an extrapolation, a share that
    grows with N). reference_left_out: values with one block of the reference left out; empty for a fixed reference.
    `note` says so if bias puts the value itself outside the interval.
    """
    from scipy.special import stdtrit  # here, because it slows the start of a stage

    debiased, variance = value, 0.0
    for values in filter(len, (left_out, reference_left_out)):
        B, mean = len(values), math.fsum(values) / len(values)
        if centre == "debiased":
            debiased += (B - 1) * (value - mean)
        variance += (B - 1) / B * math.fsum((estimate - mean) ** 2 for estimate in values)
    reach = float(stdtrit(len(left_out) - 1, 0.975)) * math.sqrt(variance)
    debiased = min(high, max(low, debiased))
    interval = (max(low, debiased - reach), min(high, debiased + reach))
    return Estimate(value, n, debiased, interval, bias_note(value, debiased, interval))


def bias_note(value: float, debiased: float, interval: tuple[float, float]) -> str:
    """Return the note on a value that its bias puts outside its interval; empty for a value inside."""
    rounding = 1e-9 * max(1.0, abs(value))
    inside = interval[0] - rounding <= value <= interval[1] + rounding
    return "" if inside else f"the interval is of {debiased:.4g}, without bias"


def mean_estimate(values: Tensor, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of one number per sample, [N]. low, high: bounds of the numbers."""
    values = values.to("cpu", torch.float64)
    value, n = float(values.mean()), len(values)
    if few := too_few(n):
        return Estimate(value, n, note=few)
    block = block_of_each(n)
    sums = torch.zeros(NUM_BLOCKS, dtype=torch.float64).index_add_(0, block, values)
    counts = torch.bincount(block, minlength=NUM_BLOCKS)
    left_out = ((sums.sum() - sums) / (n - counts)).tolist()
    return jackknife(value, left_out, n, low, high)


def share_estimate(hits: Tensor, independent: int | None = None) -> Estimate:
    """Return the share of samples for which a condition holds, bool [N], with Wilson's interval (1927): the jackknife's
    is too short for shares near zero or one, which a block may lack. independent: the effective number of independent
    samples; unset: all."""
    from scipy.stats import binomtest  # here: as above

    n, count = len(hits), int(hits.sum())
    m = independent or n
    bounds = binomtest(round(count * m / n), m).proportion_ci(method="wilson")
    return Estimate(count / n, n, count / n, (float(bounds.low), float(bounds.high)))


def jackknife_deviation(interval: Sequence[float] | None) -> float | None:
    """Return the standard deviation behind an interval of `jackknife`; None without one. It is too small for a clipped
    interval."""
    from scipy.special import stdtrit  # here: as above

    return None if interval is None else (interval[1] - interval[0]) / 2 / float(stdtrit(NUM_BLOCKS - 1, 0.975))


def too_few(n: int, m: int | None = None) -> str:
    """Return the note that replaces the interval if n samples do not fill the blocks; empty if they do. m: number of
    reference images, if blocks of the reference, of at least two images each, are left out too."""
    if n < SMALLEST_BLOCK * NUM_BLOCKS:
        return f"no interval: {n:,} samples are fewer than {SMALLEST_BLOCK * NUM_BLOCKS}"
    if m is not None and m < 2 * NUM_BLOCKS:
        return f"no interval: {m:,} reference images are fewer than {2 * NUM_BLOCKS}"
    return ""
