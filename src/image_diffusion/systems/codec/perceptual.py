"""LPIPS as a term of a codec's loss."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.resolution import shown
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.images.lpips import SMALLEST, LpipsConfig

_KEY = "system.perceptual"


class PerceptualConfig(LpipsConfig):
    """LPIPS (Zhang et al. 2018) of an image and its reconstruction, and its weight. The weights are never
    downloaded."""

    weight: float = Field(1.0, gt=0)
    """Factor of the distance in the loss."""

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError where a file is missing, or the images do not fit."""
        if spec.channels not in (1, 3) or min(spec.size) < SMALLEST:
            raise ValueError(
                f"{_KEY} is set, but LPIPS compares grey or RGB images of at least {SMALLEST} pixels; these have "
                f"{spec.channels} channels and {shown(spec.resolution)} pixels. Leave it out."
            )
        for name, path in (("backbone", self.backbone), ("heads", self.heads)):
            if not path.is_file():
                raise ValueError(f"{_KEY}.{name} is {path}, which does not exist. Bring the file, or leave it out.")

    def distance(self) -> LpipsDistance:
        """Build the distance of the term. Raises ValueError for files with other contents."""
        return LpipsDistance(self)


class LpipsDistance:
    """Two sets of images [B, C, H, W] in [-1, 1] -> LPIPS [B], computed in float32 on their device."""

    def __init__(self, config: PerceptualConfig) -> None:
        self._measure = config.build(torch.device("cpu"), _KEY)

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        self._measure.to(first.device)
        with torch.autocast(first.device.type, enabled=False):
            return self._measure.distance(first.float(), second.float())
