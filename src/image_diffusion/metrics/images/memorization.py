"""Memorization of training images: nearest neighbours in pixels and as each detector sees them, against calibrated
thresholds.

Pixels reduced to 16 x 16, because classifier features are poor at it (exact or blurred copies: 1.0 found at 1 % false
alarms against 0.03 to 0.17). Mirrored training images are searched as well; copies moved by two pixels go unnoticed, in
pixels: those a detector may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.devices import best_device
from image_diffusion.metrics.distances.precision_recall import squared_distances
from image_diffusion.metrics.features.base import Detected, ImageSet

_SIZE = 16
_READ, _AT_ONCE = 512, 8192
LEAST_HELD_OUT = 100
"""Number of held-out images that a threshold needs."""
Views = Callable[[int], tuple[Tensor, ...]]
"""Features of a block of training images from a position on, once for each view of them."""


@dataclass(frozen=True)
class Copies:
    """distance: float64 [N], to the nearest training image. nearest: int64 [N, k], positions in the training split.

    threshold: the distance below which 1 % of the held-out real images lie; None without held-out images.
    """

    distance: Tensor
    nearest: Tensor
    threshold: float | None

    @property
    def flagged(self) -> Tensor:
        """Return a mask, bool [N]: nearer to a training image than all but 1 % of real images are."""
        return self.distance < (self.threshold if self.threshold is not None else -1.0)


def reduced(images: Tensor) -> Detected:
    """Reduce uint8 images [B, C, H, W] by averaging, for comparison: float32 [B, C * 16 * 16], in [0, 1]."""
    return Detected(F.adaptive_avg_pool2d(images.to(torch.float32) / 255, _SIZE).flatten(1))


def mirrored(features: Tensor) -> Tensor:
    """Return `reduced` images mirrored left to right, [B, D]."""
    return features.view(len(features), -1, _SIZE).flip(-1).flatten(1)


def find_copies(samples: Tensor, train: ImageSet, held_out: ImageSet | None, k: int = 4) -> Copies:
    """Return the k nearest training images of every sample, mirrored ones included, and whether they are suspiciously
    near.

    samples: `reduced`, [N, D].
    """
    queries = [samples]
    if held_out is not None and held_out.num_samples >= LEAST_HELD_OUT:
        queries.append(_reduced(held_out))

    def mirrored_too(start: int) -> tuple[Tensor, ...]:
        plain = _reduced(train, start, min(start + _AT_ONCE, train.num_samples))
        return plain, mirrored(plain)

    return _nearest_views(queries, mirrored_too, train.num_samples, k)


def copies_seen(samples: Tensor, train: Tensor, held_out: Tensor | None, k: int = 4) -> Copies:
    """Return the copies by the features of a detector, [N, D], [M, D] and [H, D]."""
    queries = [samples, *([held_out] if held_out is not None and len(held_out) >= LEAST_HELD_OUT else [])]
    return _nearest_views(queries, lambda start: (train[start : start + _AT_ONCE],), len(train), k)


def _nearest_views(queries: list[Tensor], views: Views, total: int, k: int) -> Copies:
    """Return the copies among queries: of samples, and perhaps of held-out images."""
    distance, nearest = _nearest(torch.cat(queries), views, total, k)
    n = len(queries[0])
    threshold = float(distance[n:].quantile(0.01)) if len(queries) > 1 else None
    return Copies(distance[:n], nearest[:n], threshold)


def _nearest(queries: Tensor, views: Views, total: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest training image over all views, float64 [N], and the k nearest images, each
    once, int64 [N, k]. Only _AT_ONCE training images at a time are in memory, on the GPU if there is one."""
    device = best_device()
    queries = queries.to(device)
    best = torch.full((len(queries), 0), torch.inf, dtype=torch.float64, device=device)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    for start in range(0, total, _AT_ONCE):
        keys = [view.to(device) for view in views(start)]
        values, positions = [], []
        for distances in zip(*(squared_distances(queries, view) for view in keys), strict=True):
            rows = distances[0][0]
            numbers = torch.arange(start, start + len(keys[0]), device=device).expand(len(rows), -1)
            among = torch.cat([best[rows], torch.stack([squared for _, squared in distances]).amin(dim=0)], dim=1)
            nearest = among.topk(min(k, among.shape[1]), largest=False)
            values.append(nearest.values)
            positions.append(torch.cat([index[rows], numbers], dim=1).gather(1, nearest.indices))
        best, index = torch.cat(values), torch.cat(positions)
    return best[:, 0].sqrt().cpu(), index.cpu()


def _reduced(images: ImageSet, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the images from `start` to `stop`, `reduced`."""
    chosen = np.arange(start, images.num_samples if stop is None else stop)
    parts = [reduced(images.gather(rows)).features for rows in np.array_split(chosen, -(-len(chosen) // _READ))]
    return torch.cat(parts)
