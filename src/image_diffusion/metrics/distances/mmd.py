"""Kernel distance: unbiased squared MMD with the kernel (x'y / D + 1)³ (Bińkowski et al. 2018, section 4: KID).

All pairs are used; torch-fidelity and torchmetrics average over random subsets, so their values depend on the draw and
have no interval. The expectation is zero for equal distributions, so small values may be negative.

CMMD (Jayasumana et al. 2024, arXiv 2401.09603): 1000 times this distance between embeddings of norm 1, with the
Gaussian kernel exp(-|x - y|² / (2 · 10²)). The estimator is unbiased, as in the paper; the authors' program prints the
biased one, which is larger by about 2000 (1 - mean k) / n. Values are comparable with the paper's only on its CLIP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each

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
