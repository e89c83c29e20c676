"""The kernel distance: unbiased squared MMD with the kernel (x'y / D + 1)³ (Bińkowski et al. 2018, section 4: KID).

All pairs, not random subsets: the number does not depend on an order. Its expectation is zero for equal distributions,
so small values may be negative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from image_diffusion.metrics.intervals import Estimate, enough, jackknife, too_few
from image_diffusion.metrics.moments import NUM_BLOCKS, block_of_each

_ROWS = 1024
Kernel = Callable[[Tensor, Tensor], Tensor]


def kernel_distance(features: Tensor, reference: Tensor, kernel: Kernel | None = None) -> Estimate:
    """Squared MMD between [N, D] and [M, D]; its interval leaves out a block of the samples at a time. kernel: of
    float64 rows [R, D] and [S, D], [R, S]; unset: KID's."""
    of = kernel or _cubic
    n, m = len(features), len(reference)
    if n < 2 or m < 2:
        raise ValueError(f"A kernel distance needs at least 2 samples on each side; got {n} and {m}.")
    block = block_of_each(n)
    x, y = features.to(torch.float64), reference.to(torch.float64)
    within = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, dtype=torch.float64)  # pairs of samples, by their blocks
    across = torch.zeros(NUM_BLOCKS, dtype=torch.float64)
    for rows in torch.arange(n).split(_ROWS):
        pairs = _others(of, x, rows)
        columns = torch.zeros(NUM_BLOCKS, len(rows), dtype=torch.float64).index_add_(0, block, pairs.T)
        within.index_add_(0, block[rows], columns.T)
        across.index_add_(0, block[rows], of(x[rows], y).sum(dim=1))
    among = sum(float(_others(of, y, rows).sum()) for rows in torch.arange(m).split(_ROWS)) / (m * (m - 1))

    def distance(inner: Tensor, outer: Tensor, count: int) -> float:
        return float(inner) / (count * (count - 1)) + among - 2 * float(outer) / (count * m)

    value = distance(within.sum(), across.sum(), n)
    if not enough(n):
        return Estimate(value, n, note=too_few(n))
    sizes = torch.bincount(block, minlength=NUM_BLOCKS).tolist()
    left_out = [
        distance(within.sum() - within[b].sum() - within[:, b].sum() + within[b, b], across.sum() - across[b], n - size)
        for b, size in enumerate(sizes)
    ]
    return jackknife(value, left_out, n)


def _others(kernel: Kernel, x: Tensor, rows: Tensor) -> Tensor:
    """The kernel of some rows with all, and zero of each with itself."""
    pairs = kernel(x[rows], x)
    pairs[torch.arange(len(rows)), rows] = 0
    return pairs


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3
