"""Memorization of training images: distances to nearest neighbours, in pixels and in features, against calibrated
thresholds.

Pixels are reduced to 16 x 16 and compared, because classifier features detect copies poorly (exact or blurred copies:
1.0 found at 1 % false alarms against 0.03 to 0.17). Mirrored training images are searched as well; copies shifted by
two pixels are missed in pixels, but may be found in features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.devices import best_device
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.metrics.compute import fixed_subset
from image_diffusion.metrics.distances.precision_recall import squared_distances
from image_diffusion.metrics.features.base import Detected, ImageSet

_SIZE = 16
_READ, _AT_ONCE = 512, 8192
LEAST_HELD_OUT = 100
"""Minimum number of real images for a threshold."""
_MOST_OTHERS = 2000
"""Maximum number of training images that set the threshold if too few images are held out."""
_SAME = 0.1
"""Real images nearer to a training image than this share of the 90th percentile count as duplicates and set no
threshold."""
Views = Callable[[int], tuple[Tensor, ...]]
"""Start of a block of training images -> its features, once for each view, such as plain and mirrored."""


@dataclass(frozen=True)
class Copies:
    """Copies among samples. distance: float64 [N], to the nearest training image. nearest: int64 [N, k], positions in
    the training split.

    threshold: the distance below which 1 % of real images lie; None for fewer than LEAST_HELD_OUT images. These are
    held out or, if too few are, training images, each compared with the others. num_real: their number.
    """

    distance: Tensor
    nearest: Tensor
    threshold: float | None
    num_real: int

    @property
    def flagged(self) -> Tensor:
        """Return a mask, bool [N]: samples nearer to a training image than 99 % of real images are."""
        return self.distance < (self.threshold if self.threshold is not None else -1.0)


def reduced(images: Tensor) -> Detected:
    """Reduce uint8 images [B, C, H, W] by averaging, for comparison: float32 [B, C * 16 * 16], in [0, 1]."""
    return Detected(F.adaptive_avg_pool2d(images.to(torch.float32) / 255, _SIZE).flatten(1))


def reduced_rows(images: ImageSet, chosen: NDArray[np.int64]) -> Tensor:
    """Return the chosen images, at least one, after `reduced`."""
    parts = [reduced(images.gather(rows)).features for rows in np.array_split(chosen, -(-len(chosen) // _READ))]
    return torch.cat(parts)


def mirrored(features: Tensor) -> Tensor:
    """Return `reduced` images mirrored left to right, [B, D]."""
    return features.view(len(features), -1, _SIZE).flip(-1).flatten(1)


def find_copies(samples: Tensor, train: ImageSet, held_out: ImageSet | None, k: int = 4) -> Copies:
    """Return the k nearest training images of every sample, mirrored ones included, and the threshold for copies.

    samples: `reduced`, [N, D].
    """

    def mirrored_too(start: int) -> tuple[Tensor, ...]:
        plain = reduced_rows(train, np.arange(start, min(start + _AT_ONCE, train.num_samples)))
        return plain, mirrored(plain)

    if held_out is not None and held_out.num_samples >= LEAST_HELD_OUT:
        real, rows = reduced_rows(held_out, np.arange(held_out.num_samples)), None
    else:
        rows = fixed_subset(train.num_samples, _MOST_OTHERS)
        real = reduced_rows(train, rows.numpy())
    return _nearest_views(samples, real, mirrored_too, train.num_samples, k, rows)


def find_feature_copies(samples: Tensor, train: Tensor, held_out: Tensor | None, k: int = 4) -> Copies:
    """Return the copies by the features of a detector, [N, D], [M, D] and [H, D].

    Training images never set the threshold, because the data set's own classifier was trained on them.
    """
    real = samples[:0] if held_out is None else held_out
    return _nearest_views(samples, real, lambda start: (train[start : start + _AT_ONCE],), len(train), k)


def _nearest_views(
    samples: Tensor, real: Tensor, views: Views, total: int, k: int, rows: Tensor | None = None
) -> Copies:
    """Return the copies among samples. real: the images that set the threshold. rows: their indices, int64, if they are
    training images."""
    distance, nearest = _nearest(torch.cat([samples, real]), views, total, k if rows is None else max(k, 2))
    n = len(samples)
    of_real = distance[n:, 0]
    if rows is not None and total > 1:
        of_real = torch.where(nearest[n:, 0] == rows, distance[n:, 1], of_real)
    if len(of_real):
        of_real = of_real[of_real > _SAME * of_real.quantile(0.9)]
    threshold = float(of_real.quantile(0.01)) if len(of_real) >= LEAST_HELD_OUT else None
    return Copies(distance[:n, 0], nearest[:n, :k], threshold, len(of_real))


def _nearest(queries: Tensor, views: Views, total: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the distances to the k nearest training images over all views, float64 [N, k], and their distinct indices,
    int64 [N, k]. Only _AT_ONCE training images at a time are in memory, on the GPU if there is one."""
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
            among = torch.cat([best[rows], reduce(torch.minimum, [squared for _, squared in distances])], dim=1)
            nearest = among.topk(min(k, among.shape[1]), largest=False)
            values.append(nearest.values)
            positions.append(torch.cat([index[rows], numbers], dim=1).gather(1, nearest.indices))
        best, index = torch.cat(values), torch.cat(positions)
    return best.sqrt().cpu(), index.cpu()


def plot_copies(samples: ImageSet, train: ImageSet, copies: Copies, path: Path, rows: int = 10) -> None:
    """Plot the most suspicious samples, each followed by its nearest training images, nearest first."""
    worst = copies.distance.argsort()[:rows]
    images = [
        torch.cat([samples.gather(np.array([row])), train.gather(copies.nearest[row].numpy())])
        for row in worst.tolist()
    ]
    save_picture(image_grid(torch.cat(images), len(images[0])), path)
