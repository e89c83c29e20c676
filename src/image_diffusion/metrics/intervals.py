"""Intervals by the block jackknife (Quenouille 1949; Tukey 1958; Efron and Stein 1981).

The percentile bootstrap is of no use here: resampling adds the 1/N bias of a Fréchet distance a second time, and its
95 % interval covers the truth in 0 of 100 cases. Leaving out a block estimates the bias and the variance at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from image_diffusion.metrics.moments import NUM_BLOCKS

SMALLEST_BLOCK = 5


@dataclass(frozen=True)
class Estimate:
    """A number and how far it can be trusted.

    value: the statistic as the literature defines it. n: samples behind it. debiased: with its 1/N bias taken out,
    where it has one. interval: 95 %, around the debiased value; None: too few samples, and `note` says so.
    """

    value: float
    n: int
    debiased: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """An entry of metrics.json, without a floor yet (`panel.with_floor`)."""
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
) -> Estimate:
    """The estimate from a statistic and its values with one of B blocks left out.

    debiased = B value - (B - 1) mean(left_out); variance = (B - 1) / B sum (left_out - mean)²; Student's t at B - 1.
    low, high: where the statistic can lie at all; the interval is cut there. centre="value": around the value itself,
    for a statistic whose bias is not of order 1/N (one that is extrapolated, a share that grows with N).
    """
    from scipy.special import stdtrit  # here: loading it would slow the start of every stage

    B, mean = len(left_out), math.fsum(left_out) / len(left_out)
    debiased = B * value - (B - 1) * mean if centre == "debiased" else value
    deviation = math.sqrt((B - 1) / B * math.fsum((each - mean) ** 2 for each in left_out))
    reach = float(stdtrit(B - 1, 0.975)) * deviation
    interval = (min(high, max(low, debiased - reach)), min(high, max(low, debiased + reach)))
    return Estimate(value, n, min(high, max(low, debiased)), interval)


def mean_estimate(each: Tensor, block: Tensor, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """The mean of one number a sample. each: [N]; block: int64 [N], from `block_of_each`."""
    each = each.to("cpu", torch.float64)
    sums = torch.zeros(NUM_BLOCKS, dtype=torch.float64).index_add_(0, block, each)
    counts = torch.bincount(block, minlength=NUM_BLOCKS)
    value = float(each.mean())
    if not enough(len(each)):
        return Estimate(value, len(each), note=too_few(len(each)))
    left_out = ((sums.sum() - sums) / (counts.sum() - counts)).tolist()
    return jackknife(value, left_out, len(each), low, high)


def share_estimate(hits: Tensor) -> Estimate:
    """The share of samples of which something holds, bool [N], with Wilson's interval (1927): of shares near zero, of
    which a block may have none, the jackknife's is too short."""
    from scipy.stats import binomtest  # here: as above

    n, count = len(hits), int(hits.sum())
    bounds = binomtest(count, n).proportion_ci(method="wilson")
    return Estimate(count / n, n, count / n, (float(bounds.low), float(bounds.high)))


def jackknife_deviation(interval: Sequence[float] | None) -> float | None:
    """The standard deviation behind an interval of `jackknife`; None: there is none. One that was cut is too small."""
    from scipy.special import stdtrit  # here: as above

    return None if interval is None else (interval[1] - interval[0]) / 2 / float(stdtrit(NUM_BLOCKS - 1, 0.975))


def enough(n: int) -> bool:
    """Whether n samples fill the blocks well enough for an interval."""
    return n >= SMALLEST_BLOCK * NUM_BLOCKS


def too_few(n: int) -> str:
    """The note that stands in place of an interval."""
    return f"no interval: {n:,} samples are fewer than {SMALLEST_BLOCK * NUM_BLOCKS}"
