"""Distances between two sets of features: the Fréchet distance of their Gaussians, MIND, and kernel distances.

Fréchet distance between two Gaussians, without a matrix square root:

    d² = |mu_1 - mu_2|² + tr(S_1) + tr(S_2) - 2 tr((S_1 S_2)^½)   (Dowson and Landau 1982, eq. 4)

With S_i = F_i F_i' the last trace is the sum of the singular values of F_1' F_2. Singular values have an absolute error
of eps times the largest, so a singular covariance (fewer samples than dimensions) costs no precision, and no complex
number can appear. A matrix square root is slower and less exact (docs/design.md). NumPy's LAPACK finds eigenvalues in a
third of the time of PyTorch's, and singular values in 0.8 of it (an AMD EPYC, 2048 dimensions).

MIND, the Monge Inception distance (Berthet et al. 2026, arXiv 2605.06797), from Wasserstein distances of projections:

    3 D · mean over 1,000 directions u of W₂²(u'X, u'Y)

The factor makes it 3 |shift|² if one set is the other one, shifted. In one dimension W₂² compares sorted numbers; sets
of unequal size are compared quantile by quantile, which is exact; the paper uses sets of equal size.

Kernel distance: unbiased squared MMD with the kernel (x'y / D + 1)³ (Bińkowski et al. 2018, section 4: KID). All pairs
are used; torch-fidelity and torchmetrics average over random subsets, so their values depend on the draw and have no
interval. The expectation is zero for equal distributions, so small values may be negative.

CMMD (Jayasumana et al. 2024, arXiv 2401.09603): 1000 times this distance between embeddings of norm 1, with the
Gaussian kernel exp(-|x - y|² / (2 · 10²)). The estimator is unbiased, as in the paper; the authors' program prints the
biased one, which is larger by about 2000 (1 - mean k) / n. Values are comparable with the paper's only on its CLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

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


_ROWS = 1024
_CMMD_SIGMA, _CMMD_SCALE = 10.0, 1000.0
Kernel = Callable[[Tensor, Tensor], Tensor]
OwnPairs = tuple[Tensor, Tensor]
"""Sums of a kernel over the pairs of different rows of one set, float64: by pair of blocks, [B, B], and in total."""


def kernel_distance(
    features: Tensor, reference: Tensor, kernel: Kernel | None = None, reference_pairs: OwnPairs | None = None
) -> Estimate:
    """Return the squared MMD between [N, D] and [M, D]; its interval, centred on the unbiased value, leaves out one
    block of the samples, then of the reference, at a time. The estimator may be negative, the distance may not: the
    interval is bounded as in `jackknife` (Mandelkern and Schultz 2000), so that it contains zero even if the two sets
    share images, which makes the estimator too small.

    kernel: float64 rows [R, D] and [S, D] -> [R, S]; unset: KID's kernel. reference_pairs: `own_pairs` of the
    reference with this kernel; unset: computed. Raises ValueError for fewer than 2 rows on either side.
    """
    kernel = kernel or _cubic
    n, m = len(features), len(reference)
    if n < 2 or m < 2:
        raise ValueError(f"A kernel distance needs at least 2 samples on each side; got {n} and {m}.")
    x, y = features.to(torch.float64), reference.to(torch.float64)
    block, block_of_reference = block_of_each(n), block_of_each(m)
    within, inner = own_pairs(x, kernel)
    within_reference, among = reference_pairs or own_pairs(y, kernel)
    across = torch.zeros(NUM_BLOCKS, dtype=torch.float64)  # for each block of the samples
    across_reference = torch.zeros(NUM_BLOCKS, dtype=torch.float64)
    for rows in torch.arange(n).split(_ROWS):
        pairs = kernel(x[rows], y)
        across.index_add_(0, block[rows], pairs.sum(dim=1))
        across_reference.index_add_(0, block_of_reference, pairs.sum(dim=0))
    outer = across.sum()
    value = _distance(inner, among, outer, n, m)
    if few := too_few(n, m):
        return Estimate(value, n, note=few)
    sizes, of_reference = (
        torch.bincount(blocks, minlength=NUM_BLOCKS).tolist() for blocks in (block, block_of_reference)
    )
    left_out = [_distance(_without(within, b), among, outer - across[b], n - size, m) for b, size in enumerate(sizes)]
    reference_left_out = [
        _distance(inner, _without(within_reference, b), outer - across_reference[b], n, m - size)
        for b, size in enumerate(of_reference)
    ]
    estimate = jackknife(value, left_out, n, centre="value", reference_left_out=reference_left_out)
    low, high = estimate.interval or (value, value)
    return replace(estimate, interval=(low, high - min(0.0, value)))


def own_pairs(features: Tensor, kernel: Kernel | None = None) -> OwnPairs:
    """Return the sums over the pairs of one set [N, D]. kernel: as in `kernel_distance`."""
    return _within(kernel or _cubic, features.to(torch.float64), block_of_each(len(features)))


def cmmd(features: Tensor, reference: Tensor) -> Estimate:
    """Return CMMD between [N, D] and [M, D], normalized to norm 1; its interval leaves out a block of samples at a
    time."""
    x, y = (F.normalize(rows.to(torch.float64), dim=1) for rows in (features, reference))
    return kernel_distance(x, y, lambda a, b: gaussian_kernel(a, b, _CMMD_SIGMA).mul_(_CMMD_SCALE))


def gaussian_kernel(x: Tensor, y: Tensor, sigma: float) -> Tensor:
    """Return exp(-|x_i - y_j|² / (2 sigma²)), [N, M], in the precision of x and y."""
    squared = (x.square().sum(dim=1, keepdim=True) + y.square().sum(dim=1)).sub_(2 * x @ y.T)
    return squared.clamp_(min=0).neg_().div_(2 * sigma**2).exp_()


def _distance(inner: Tensor, among: Tensor, outer: Tensor, n: int, m: int) -> float:
    """Return the unbiased estimator, from the sums over pairs of samples, pairs of reference rows, and mixed pairs."""
    return float(inner) / (n * (n - 1)) + float(among) / (m * (m - 1)) - 2 * float(outer) / (n * m)


def _within(kernel: Kernel, x: Tensor, block: Tensor) -> OwnPairs:
    sums = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, dtype=torch.float64)
    for rows in torch.arange(len(x)).split(_ROWS):
        columns = torch.zeros(NUM_BLOCKS, len(rows), dtype=torch.float64)
        pairs = kernel(x[rows], x)
        pairs[torch.arange(len(rows)), rows] = 0  # without pairs of a row with itself
        columns.index_add_(0, block, pairs.T)
        sums.index_add_(0, block[rows], columns.T)
    return sums, sums.sum()


def _without(sums: Tensor, b: int) -> Tensor:
    """Return the sum over the pairs that have no member in block b."""
    left: Tensor = sums.sum() - sums[b].sum() - sums[:, b].sum() + sums[b, b]
    return left


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).div_(x.shape[1]).add_(1).pow_(3)
