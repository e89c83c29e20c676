"""MIND, the Monge Inception distance (Berthet et al. 2026, arXiv 2605.06797): Wasserstein distances of projections.

    3 D · mean over 1,000 directions u of W₂²(u'X, u'Y)

The factor makes it 3 |shift|² if one set is the other one, shifted. In one dimension W₂² compares sorted numbers; sets
of unequal size are compared quantile by quantile, which is exact; the paper uses sets of equal size.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each

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
