"""Metrics of a classifier on samples that were requested by class."""

from __future__ import annotations

import torch
from torch import Tensor

from image_diffusion.metrics.distances.frechet import SAMPLES_PER_DIMENSION, frechet_distance
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, share_estimate, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, Gaussian, Moments, block_of_each

_MISSING = 0.1


def agreement(recognised: Tensor, labels: Tensor) -> Estimate:
    """Return the share of samples recognised as the requested class. Both arguments: int64 [N]."""
    return share_estimate(recognised == labels)


def missing_classes(recognised: Tensor, labels: Tensor, classes: list[str]) -> Estimate:
    """Count the classes recognised less than a tenth as often as requested. The note names them."""
    requested_counts = torch.bincount(labels, minlength=len(classes))
    recognised_counts = torch.bincount(recognised, minlength=len(classes))
    missing = [
        name
        for name, a, s in zip(classes, requested_counts.tolist(), recognised_counts.tolist(), strict=True)
        if s < _MISSING * a
    ]
    return Estimate(len(missing), len(labels), note=", ".join(missing))


def confusion(recognised: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the confusion matrix, int64 [K, K]: how often class i was requested and class j recognised."""
    return torch.bincount(labels * num_classes + recognised, minlength=num_classes**2).view(num_classes, num_classes)


def class_frechet(features: Tensor, labels: Tensor, reference: Tensor, reference_labels: Tensor) -> Estimate:
    """Return the mean over classes of the Fréchet distance within the class, over classes with two images on both
    sides.

    It is zero only if the images match their labels. Absent classes do not raise it: `missing_classes` counts them.
    """
    both = [int(c) for c in labels.unique() if (labels == c).sum() > 1 and (reference_labels == c).sum() > 1]
    if not both:
        return Estimate(0.0, len(labels), note="no class has two samples and two reference images")
    gaussians = {c: Moments.from_features(reference[reference_labels == c]).gaussian for c in both}
    value = _mean_distance(features, labels, gaussians)
    smallest = min(int((labels == c).sum()) for c in both)
    left_out = len(both) < len(labels.unique())
    note = f"over {len(both)} of {len(labels.unique())} classes" if left_out else ""
    if smallest < SAMPLES_PER_DIMENSION * features.shape[1] or too_few(len(labels)):
        few = f"biased: the smallest class has {smallest:,} samples, fewer than 5 a dimension"
        return Estimate(value, len(labels), note="; ".join(filter(None, (few, note))))
    block = block_of_each(len(labels))
    without = [_mean_distance(features[block != b], labels[block != b], gaussians) for b in range(NUM_BLOCKS)]
    return jackknife(value, without, len(labels), low=0.0)


def _mean_distance(features: Tensor, labels: Tensor, gaussians: dict[int, Gaussian]) -> float:
    distances = [
        frechet_distance(Moments.from_features(features[labels == c]).gaussian, real) for c, real in gaussians.items()
    ]
    return sum(distances) / len(distances)
