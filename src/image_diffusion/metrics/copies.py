"""Does the model repeat its training images? Nearest neighbours in pixels, against a calibrated threshold.

Pixels reduced to 16 x 16, because classifier features are poor at it (exact or blurred copies: 1.0 found at 1 % false
alarms against 0.03 to 0.17). Mirrored training images are searched as well; copies moved by two pixels go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.features import ImageSet
from image_diffusion.metrics.neighbours import squared_distances

_SIZE = 16
_READ = 512


@dataclass(frozen=True)
class Copies:
    """distance: float64 [N], to the nearest training image. nearest: int64 [N, k], positions in the training split.

    threshold: the distance under which 1 % of the held-out real images lie; None without held-out images.
    """

    distance: Tensor
    nearest: Tensor
    threshold: float | None

    @property
    def flagged(self) -> Tensor:
        """Bool [N]: nearer to a training image than all but 1 % of real images are."""
        return self.distance < (self.threshold if self.threshold is not None else -1.0)


def find_copies(samples: ImageSet, train: ImageSet, held_out: ImageSet | None, k: int = 4) -> Copies:
    """The k nearest training images of every sample, mirrored ones included, and whether they are suspiciously near."""
    plain = _reduced(train)
    size = plain.shape[1] // _SIZE
    mirrored = plain.view(len(plain), size, _SIZE).flip(-1).flatten(1)
    distance, nearest = _nearest(_reduced(samples), plain, mirrored, k)
    threshold = None
    if held_out is not None and held_out.num_samples >= 100:
        threshold = float(_nearest(_reduced(held_out), plain, mirrored, 1)[0].quantile(0.01))
    return Copies(distance, nearest, threshold)


def _nearest(queries: Tensor, plain: Tensor, mirrored: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distance [N] of the nearest, and the k nearest of `plain` and `mirrored` [N, k], each image once."""
    distances, indices = [], []
    both = zip(squared_distances(queries, plain), squared_distances(queries, mirrored), strict=True)
    for (_, straight), (_, flipped) in both:
        found = torch.minimum(straight, flipped).topk(min(k, len(plain)), largest=False)
        distances.append(found.values[:, 0].sqrt())
        indices.append(found.indices)
    return torch.cat(distances), torch.cat(indices)


def _reduced(images: ImageSet) -> Tensor:
    """Float32 [N, C * 16 * 16]: the images in [0, 1], reduced by averaging."""
    parts = [
        F.adaptive_avg_pool2d(images.gather(chosen).to(torch.float32) / 255, _SIZE).flatten(1)
        for chosen in np.array_split(np.arange(images.num_samples), -(-images.num_samples // _READ))
    ]
    return torch.cat(parts)
