"""The metrics check themselves: real images must be nearer to real images than degraded ones are.

Of the training images two halves are drawn, of at most 2,500 each, and the second is degraded as well: reduced to a
quarter of its side, enlarged again, and of half its contrast. A judge to which the degraded half is no farther from
the first than the plain one is judges nothing, whatever the reason: weights that are not what they should be, features
that hold nothing of the images, files of another set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.features import Detected, Detector, ImageSet, detect_each
from image_diffusion.metrics.frechet import frechet_distance
from image_diffusion.metrics.kernel import kernel_distance
from image_diffusion.metrics.panel import gaussians_of

MOST, LEAST = 2500, 20
"""Images of a half. Fewer than the least tell nothing."""


class Part:
    """Some images of a set. indices: their positions in it."""

    def __init__(self, images: ImageSet, indices: NDArray[np.int64]) -> None:
        self._images, self._indices = images, indices
        self.num_samples, self.shape = len(indices), images.shape
        self.labels, self.classes = np.asarray(images.labels)[indices], images.classes
        self.digest = f"{images.digest}, {len(indices)} drawn"

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        """Uint8 [B, C, H, W]: the images at these positions."""
        return self._images.gather(self._indices[indices])


class Degraded(Part):
    """The same images, degraded."""

    def __init__(self, images: ImageSet, indices: NDArray[np.int64]) -> None:
        super().__init__(images, indices)
        self.digest += ", degraded"

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        return degraded(super().gather(indices))


def degraded(images: Tensor) -> Tensor:
    """Uint8 [B, C, H, W], a quarter as sharp and of half the contrast."""
    height, width = images.shape[2:]
    small = F.adaptive_avg_pool2d(images.to(torch.float32), (max(1, height // 4), max(1, width // 4)))
    large = F.interpolate(small, (height, width), mode="bilinear", align_corners=False)
    return (63.75 + large / 2).round().to(torch.uint8)


def halves(num_images: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of two halves of a set, drawn once and for all, each in order; none of a set that is too small."""
    n = min(num_images // 2, MOST)
    n = n if n >= LEAST else 0
    order: NDArray[np.int64] = np.random.default_rng(0).permutation(num_images)
    return np.sort(order[:n]), np.sort(order[n : 2 * n])


def degraded_half(images: ImageSet) -> Degraded:
    """The second half of a set, degraded."""
    return Degraded(images, halves(images.num_samples)[1])


def look_and_test(detectors: Sequence[Detector], images: ImageSet) -> dict[str, dict[str, Any]]:
    """`self_test` of images that are looked at for nothing else."""
    parts = [*(Part(images, half) for half in halves(images.num_samples)), degraded_half(images)]
    if parts[0].num_samples == 0:
        return {}
    first, second, third = (detect_each(detectors, part, "self-test") for part in parts)
    return self_test(detectors, list(zip(first, second, strict=True)), third)


def self_test(
    detectors: Sequence[Detector], real: Sequence[tuple[Detected, Detected]], worse: Sequence[Detected]
) -> dict[str, dict[str, Any]]:
    """By the name of each distance on each detector: what one half scores against the other, and what the degraded one
    does, with the number of images of a half and whether the order is right. A detector that fails is doubted from here
    on, and all that it measures with it.

    real: what each detector sees in the two `halves`; worse: in the second one, degraded. The Fréchet distance is left
    out where a half has fewer images than there are features, since it is then more of their number than of them.
    """
    found: dict[str, dict[str, Any]] = {}
    if not real:  # the set is too small to be halved
        return found
    for detector, (first, second), third in zip(detectors, real, worse, strict=True):
        of_judge = _distances(first, second, third)
        found |= {detector.metric_name(name): entry for name, entry in of_judge.items()}
        wrong = next((name for name, entry in of_judge.items() if not entry["passed"]), None)
        if wrong is not None and detector.doubt is None:
            detector.doubt = _doubt(detector.metric_name(wrong), of_judge[wrong])
    return found


def _distances(first: Detected, second: Detected, third: Detected) -> dict[str, dict[str, Any]]:
    pairs: dict[str, tuple[float, float]] = {}
    if len(first) >= first.features.shape[1]:
        one, two, three = (gaussians_of(Detected(each.features))["fd"] for each in (first, second, third))
        pairs["fd"] = frechet_distance(two, one), frechet_distance(three, one)
    half, worse = (kernel_distance(each.features, first.features).value for each in (second, third))
    pairs["kd"] = half, worse
    return {
        name: {"half": half, "degraded": worse, "n": len(first), "passed": half < worse}
        for name, (half, worse) in pairs.items()
    }


def _doubt(name: str, entry: Mapping[str, Any]) -> str:
    return (
        f"the self-test of {name} failed: {entry['n']:,} real images score {entry['half']:.4g} beside as many others, "
        f"and blurred and faded {entry['degraded']:.4g}, which is no more. Check the detector's weights and the images"
    )
