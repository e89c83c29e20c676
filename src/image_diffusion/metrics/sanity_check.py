"""Sanity check of a detector: degraded images must be farther from real images than other real images are.

Two halves of the training images are drawn, of at most 2,500 images each, and a copy of the second is degraded: reduced
to a quarter of its side, enlarged again, and halved in contrast. If the degraded half is not farther from the first
half than the plain one is, the detector is unusable, for whatever reason: wrong weights, uninformative features, or
files of another set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.distances.moments import Moments
from image_diffusion.metrics.distances.set_distances import frechet_distance, kernel_distance
from image_diffusion.metrics.features.base import Detected, Detector, ImageSet, detect_each

MOST, LEAST = 2500, 20
"""Maximum and minimum number of images in each half. With fewer images, there is no check."""


class Part:
    """Some images of a set. indices: their positions in it."""

    def __init__(self, images: ImageSet, indices: NDArray[np.int64]) -> None:
        self._images, self._indices = images, indices
        self.num_samples, self.shape = len(indices), images.shape
        self.labels, self.classes = np.asarray(images.labels)[indices], images.classes
        self.digest, self.selection = f"{images.digest}, {len(indices)} drawn", images.selection

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the images at these positions, [B, C, H, W]: pictures as uint8, arrays as float32 from 0 to 255."""
        return self._images.gather(self._indices[indices])


class Degraded(Part):
    """Degraded copy of the images of a set."""

    def __init__(self, images: ImageSet, indices: NDArray[np.int64]) -> None:
        super().__init__(images, indices)
        self.digest += ", degraded"

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        return degraded(super().gather(indices))


def degraded(images: Tensor) -> Tensor:
    """Reduce images, uint8 [B, C, H, W], to a quarter of their sharpness and half of their contrast."""
    height, width = images.shape[2:]
    small = F.adaptive_avg_pool2d(images.to(torch.float32), (max(1, height // 4), max(1, width // 4)))
    large = F.interpolate(small, (height, width), mode="bilinear", align_corners=False)
    return (63.75 + large / 2).round().to(torch.uint8)


def halves(num_images: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of two halves of a set, a fixed random draw, each in order; empty if the set is too
    small."""
    n = min(num_images // 2, MOST)
    n = n if n >= LEAST else 0
    order: NDArray[np.int64] = np.random.default_rng(0).permutation(num_images)
    return np.sort(order[:n]), np.sort(order[n : 2 * n])


def degraded_half(images: ImageSet) -> Degraded:
    """Return a degraded copy of the second half of a set."""
    return Degraded(images, halves(images.num_samples)[1])


def run_self_test(detectors: Sequence[Detector], images: ImageSet) -> dict[str, dict[str, Any]]:
    """Compute the features of both halves and return the `self_test`."""
    parts = [*(Part(images, half) for half in halves(images.num_samples)), degraded_half(images)]
    if parts[0].num_samples == 0:
        return {}
    return self_test(zip(detectors, *(detect_each(detectors, part, "self-test") for part in parts), strict=True))


def self_test(features: Iterable[tuple[Detector, Detected, Detected, Detected]]) -> dict[str, dict[str, Any]]:
    """Return, by the name of each distance on each detector, the score of the second half against the first, the score
    of its degraded copy, the number of images in a half, and whether the order is right. If not, the doubt is set on
    the detector, and thus on all its metrics.

    features: for each detector, the features of the two `halves` and of the degraded second half. The Fréchet distance
    is left out if a half has fewer images than features, since their number would then dominate it.
    """
    scores: dict[str, dict[str, Any]] = {}
    for detector, first, second, third in features:
        distances = _distances(first.features, second.features, third.features)
        scores |= {detector.metric_name(name): entry for name, entry in distances.items()}
        wrong = next((name for name, entry in distances.items() if not entry["passed"]), None)
        if wrong is not None and detector.doubt is None:
            detector.doubt = _reason(detector.metric_name(wrong), distances[wrong])
    return scores


def _distances(first: Tensor, second: Tensor, third: Tensor) -> dict[str, dict[str, Any]]:
    pairs: dict[str, tuple[float, float]] = {}
    if len(first) >= first.shape[1]:
        one, two, three = (Moments.from_features(features).gaussian for features in (first, second, third))
        pairs["fd"] = frechet_distance(two, one), frechet_distance(three, one)
    pairs["kd"] = kernel_distance(second, first).value, kernel_distance(third, first).value
    return {
        name: {"half": half, "degraded": worse, "n": len(first), "passed": half < worse}
        for name, (half, worse) in pairs.items()
    }


def _reason(name: str, entry: Mapping[str, Any]) -> str:
    return (
        f"the self-test of {name} failed: {entry['n']:,} real images score {entry['half']:.4g} beside as many others, "
        f"and blurred and faded {entry['degraded']:.4g}, which is no more. Check the detector's weights and the images"
    )
