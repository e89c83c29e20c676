"""Wasserstein distances between sets of features: of the Gaussians with their moments, which is the Fréchet distance,
and of one-dimensional projections, which is MIND.

Fréchet distance between two Gaussians, without a matrix square root:

    d² = |mu_1 - mu_2|² + tr(S_1) + tr(S_2) - 2 tr((S_1 S_2)^½)   (Dowson and Landau 1982, eq. 4)

With S_i = F_i F_i' the last trace is the sum of the singular values of F_1' F_2. Singular values have an absolute error
of eps times the largest, so a singular covariance (fewer samples than dimensions) costs no precision, and no complex
number can appear. A matrix square root is slower and less exact (docs/design.md). NumPy's LAPACK finds eigenvalues in a
third of the time of PyTorch's, and singular values in 0.8 of it (an AMD EPYC, 2048 dimensions).

MIND, the Monge Inception distance (Berthet et al. 2026, arXiv 2605.06797), is the Wasserstein distance of projections:

    3 D · mean over 1,000 directions u of W₂²(u'X, u'Y)

The factor makes it 3 |shift|² if one set is the other one, shifted. In one dimension W₂² compares sorted numbers; sets
of unequal size are compared quantile by quantile, which is exact; the paper uses sets of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, too_few
from image_diffusion.metrics.distances.moments import (
    NUM_BLOCKS,
    Gaussian,
    Moments,
    block_moments,
    block_of_each,
    merged,
)

_ACCURACY = 1e-10  # relative
SAMPLES_PER_DIMENSION = 5  # from here, the jackknife's interval has its nominal coverage; at 1.5 it covers 67 %


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return the squared Fréchet distance d² (the number that the literature calls FID, on Inception features). Raises
    ValueError if the dimensions differ."""
    if first.dimension != second.dimension:
        raise ValueError(
            f"The features have {first.dimension} dimensions but the reference has {second.dimension}. "
            "Measure both with the same detector."
        )
    separate = float((first.mean - second.mean).square().sum() + first.covariance.trace() + second.covariance.trace())
    product = first.factor.T @ second.factor
    product = product if product.shape[0] >= product.shape[1] else product.T
    if product.numel() == 0:  # all features of one side are equal
        return separate
    # Half the time of singular values, where it is known to be as exact: the root of an eigenvalue that is
    # off by eps max is off by eps max / (2 root).
    squares = torch.from_numpy(np.linalg.eigvalsh((product.T @ product).numpy()))
    if squares[0] > 0:
        distance = separate - 2 * float(squares.sqrt().sum())
        off = torch.finfo(torch.float64).eps * float(squares[-1] * squares.rsqrt().sum())
        if off < _ACCURACY * distance:
            return distance
    return max(0.0, separate - 2 * float(np.linalg.svd(product.numpy(), compute_uv=False).sum()))


def frechet_estimate(blocks: Sequence[Moments], reference: Gaussian) -> Estimate:
    """Return the Fréchet distance of a sample set, in blocks, to a fixed reference: value, debiased value, interval.

    With fewer than five samples per dimension, the interval is None and the note contains "biased".
    """
    total = merged(blocks)
    value = frechet_distance(total.gaussian, reference)
    needed = SAMPLES_PER_DIMENSION * reference.dimension
    if total.count < needed:
        note = (
            f"biased: {total.count:,} samples are fewer than 5 a dimension ({needed:,}); "
            "comparable only at the same number of samples"
        )
        return Estimate(value, total.count, note=note)
    left_out = [frechet_distance(total.without(block).gaussian, reference) for block in blocks]
    return jackknife(value, left_out, total.count, low=0.0)


def frechet_between(features: Tensor, reference: Tensor) -> Estimate:
    """Return `frechet_estimate` of features [N, D] to those of a reference [M, D]."""
    return frechet_estimate(block_moments(features), Moments.from_features(reference).gaussian)


def frechet_infinity(blocks: Sequence[Moments], reference: Gaussian) -> Estimate:
    """Extrapolate the distance to infinitely many samples by a straight line in 1/N (Chong and Forsyth 2020, section
    4).

    The points are the merged first 10, 11, … of the blocks; the fit's jackknife leaves out one block at a time.
    """

    @cache
    def point(numbers: tuple[int, ...]) -> tuple[float, float]:
        moments = merged(blocks[number] for number in numbers)
        return 1 / moments.count, frechet_distance(moments.gaussian, reference)

    def intercept(numbers: tuple[int, ...]) -> float:
        points = [point(numbers[:end]) for end in range(len(numbers) // 2, len(numbers) + 1)]
        return float(np.polyfit([x for x, _ in points], [y for _, y in points], 1)[1])

    count = sum(block.count for block in blocks)
    every = tuple(range(len(blocks)))
    value = intercept(every)
    if count < 2 * SAMPLES_PER_DIMENSION * reference.dimension:
        return Estimate(value, count, note="biased: the line needs at least 10 samples a dimension")
    left_out = [intercept(every[:i] + every[i + 1 :]) for i in every]
    return jackknife(value, left_out, count, centre="value")


_DIRECTIONS, _OF_INTERVAL = 1000, 100


def monge_distance(features: Tensor, reference: Tensor) -> Estimate:
    """Return the distance between [N, D] and [M, D]; its interval leaves out one block of the samples, then of the
    reference, at a time, along 100 directions: both sides contribute to its bias and variance. Raises ValueError for
    fewer than 2 samples on either side."""
    n, m, dimension = len(features), len(reference), features.shape[1]
    if n < 2 or m < 2:
        raise ValueError(f"A Monge distance needs at least 2 samples on each side; got {n} and {m}.")
    along, few = [], too_few(n, m)
    left_out, reference_left_out = torch.zeros(2, NUM_BLOCKS, dtype=torch.float64)  # changes when a block is left out
    for some in _directions(dimension).split(_OF_INTERVAL):
        x, order = (features.to(torch.float64) @ some.T).T.sort(dim=1)  # [directions, N]
        y, reference_order = (reference.to(torch.float64) @ some.T).T.sort(dim=1)
        along.append(float(_squared(x, y).mean()))
        if len(along) == 1 and not few:
            of_block, of_reference_block = block_of_each(n)[order], block_of_each(m)[reference_order]
            for b in range(NUM_BLOCKS):
                left_out[b] = _squared(x.masked_select(of_block != b).view(len(some), -1), y).mean() - along[0]
                remaining = y.masked_select(of_reference_block != b).view(len(some), -1)
                reference_left_out[b] = _squared(x, remaining).mean() - along[0]
    value = 3 * dimension * float(np.mean(along))
    if few:
        return Estimate(value, n, note=few)
    values, of_reference = ((value + 3 * dimension * change).tolist() for change in (left_out, reference_left_out))
    return jackknife(value, values, n, low=0.0, reference_left_out=of_reference)


@cache
def _directions(dimension: int) -> Tensor:
    """Return fixed random directions, float64 [1000, D] of norm 1."""
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((_DIRECTIONS, dimension)))
    directions: Tensor = drawn / drawn.norm(dim=1, keepdim=True)
    return directions


def _squared(x: Tensor, y: Tensor) -> Tensor:
    """Return W₂² of rows [R, N] and [R, M] of sorted numbers, [R]: the integral of their squared difference over
    quantiles."""
    first, second, share = _quantiles(x.shape[1], y.shape[1])
    difference = torch.from_numpy(x.numpy().take(first, axis=1) - y.numpy().take(second, axis=1))  # a third of the time
    return difference.square() @ share


@cache
def _quantiles(n: int, m: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
    """Return the pieces on which the quantile functions of n and m sorted numbers are constant: the index in each, and
    the length."""
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)  # in units of 1 / nm, so exact
    starts = np.concatenate([[0], ends[:-1]])
    return starts // m, starts // n, torch.from_numpy((ends - starts) / (n * m))
