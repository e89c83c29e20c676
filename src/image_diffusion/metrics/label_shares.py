"""Real images in the label shares of samples, so that a distance compares like with like.

A distance between two mixtures of classes also measures the difference in their shares. Real images of two classes in
equal shares are far from real images of the same classes in shares of nine to one. If shares differ by more than
`LEAST_DIFFERENCE`, the reference's Gaussians are those of a mixture with the samples' shares, and metrics that need
single images use its largest subset with these shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from image_diffusion.metrics.distances.moments import Gaussian, Moments

LEAST_DIFFERENCE = 0.05
"""Threshold of the total variation between label shares, beyond the variation expected by chance, for reweighting a
reference. Our choice: nearly balanced sets such as ImageNet (0.013) are compared as in their protocols."""


def label_shares(labels: Tensor, num_classes: int) -> Tensor:
    """Return the share of each class, float64 [K]. labels: int64 [N], at least one."""
    return torch.bincount(labels, minlength=num_classes).double() / len(labels)


def difference(first: Tensor, second: Tensor) -> float:
    """Return the total variation between two label shares, float64 [K]: from 0 to 1."""
    return float((first - second).abs().sum() / 2)


def by_chance(shares: Tensor, count: int) -> float:
    """Return the approximate expected total variation between shares, float64 [K], and the shares of `count` labels
    drawn from them: mean deviations of binomials, in the normal limit."""
    return float((2 * shares * (1 - shares) / (torch.pi * count)).sqrt().sum() / 2)


def rows_in_shares(labels: Tensor, shares: Tensor) -> Tensor:
    """Return the rows of the largest subset with these label shares, int64, in order.

    Classes that the set lacks are left out; of each other class, the first images are used.

    labels: int64 [N]. shares: float64 [K].
    """
    counts = torch.bincount(labels, minlength=len(shares)).double()
    present = (counts > 0) & (shares > 0)
    if not bool(present.any()):
        return torch.empty(0, dtype=torch.int64)
    total = float((counts[present] / shares[present]).min())
    sizes = torch.where(present, total * shares + 1e-9, 0).long()
    rows = [(labels == label).nonzero().flatten()[:count] for label, count in enumerate(sizes.tolist()) if count]
    return torch.cat(rows).sort().values if rows else torch.empty(0, dtype=torch.int64)


def gaussian_in_shares(features: Tensor, labels: Tensor, shares: Tensor) -> Gaussian:
    """Return the Gaussian of a mixture of the classes with these shares, from all images of each class.

    features: [N, D]. labels: int64 [N]. shares: float64 [K]; classes that the set lacks are left out.
    """
    of_class = {
        int(label): Moments.from_features(features[labels == label])
        for label in labels.unique()
        if float(shares[int(label)]) > 0
    }
    total = sum(float(shares[label]) for label in of_class)
    weights = {label: float(shares[label]) / total for label in of_class}
    mean = torch.stack([weights[label] * moments.mean for label, moments in of_class.items()]).sum(dim=0)
    covariance = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for label, moments in of_class.items():
        apart = moments.mean - mean
        covariance += weights[label] * (moments.m2 / max(1, moments.count - 1) + torch.outer(apart, apart))
    return Gaussian(mean, covariance, sum(moments.count for moments in of_class.values()))
