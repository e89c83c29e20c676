"""Effective number of samples: the number of different images that a set is equivalent to.

Order two of the Vendi score (Pasarkar and Dieng 2023, "Cousins of the Vendi score"), which is the Rényi kernel entropy
score of Jalali et al. (2023, "An information-theoretic evaluation of generative models in learning multi-modal
distributions"): 1 / E[k(x, y)²] for independent x and y. Unlike the score of order one, which grows with the number of
images, its denominator has an unbiased estimate, so that sets of different sizes are comparable (Ospanov and Farnia
2024, "Do Vendi scores converge with finite samples?").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each
from image_diffusion.metrics.distances.precision_recall import neighbour_radii, squared_distances


def bandwidth(features: Tensor) -> float:
    """Return the median distance of the training images to the nearest other one, at which k falls to exp(-1/2).
    features: float32 [N, D]; NaN for fewer than two."""
    if len(features) < 2:
        return math.nan
    return float(neighbour_radii(features, 1).cpu().sqrt().median())


def effective_number(features: Tensor, sigma: float) -> Estimate:
    """Return 1 / mean k(x_i, x_j)² over the pairs i ≠ j, with k(x, y) = exp(-|x - y|² / (2 sigma²)).

    A set of m equally frequent images that have nothing in common has m; identical images have 1. features: float32 [N,
    D]. sigma: the bandwidth, in units of the features; the interval assumes it is exact. NaN if no two images are
    similar, which means only that the number is large.
    """
    n = len(features)
    if n < 2 or not sigma > 0:
        return Estimate(math.nan, n, note="not measured: it takes two images, and training images that differ")
    block = block_of_each(n)
    sums = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, dtype=torch.float64)  # of k², by the blocks of both images
    for rows, squared in squared_distances(features, features):
        similar = torch.exp(-squared.cpu() / sigma**2)
        places = torch.arange(n)[rows]
        similar[torch.arange(len(places)), places] = 0  # without pairs of an image with itself
        of_rows = torch.zeros(len(places), NUM_BLOCKS, dtype=torch.float64).index_add_(1, block, similar)
        sums.index_add_(0, block[places], of_rows)
    total = float(sums.sum())
    if total == 0:
        return Estimate(math.nan, n, note="not measured: no two images are alike")
    value = n * (n - 1) / total
    if few := too_few(n):
        return Estimate(value, n, note=few)
    left = n - torch.bincount(block, minlength=NUM_BLOCKS)
    without = sums.sum() - sums.sum(dim=0) - sums.sum(dim=1) + sums.diagonal()
    # The interval is that of the mean of k², which is unbiased and symmetric, not that of its inverse.
    mean = jackknife(total / n / (n - 1), (without / left / (left - 1)).tolist(), n, 0, 1)
    assert mean.interval is not None
    low, high = mean.interval
    if low == 0:
        return Estimate(value, n, note="no interval: too few images are alike")
    return Estimate(value, n, value, (1 / high, 1 / low))
