"""Levels of images that are arrays: dtype, channels, and the range that is mapped to [-1, 1] for a network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Sparse

if TYPE_CHECKING:
    from torch import Tensor

DType = Literal["uint8", "uint16", "int16", "float32"]
"""Dtype of the numbers of an array."""


class Levels(Sparse):
    """Levels of an image [C, H, W] that is an array. Images without levels are 8-bit pictures."""

    if_set: ClassVar[frozenset[str]] = frozenset({"pixel_size"})

    dtype: DType
    """Dtype of the numbers, in shards and in samples."""
    channels: tuple[str, ...] = Field(min_length=1)
    """Names of the channels."""
    low: tuple[float, ...]
    """Number of each channel that is mapped to -1 for the network; smaller numbers are clipped."""
    high: tuple[float, ...]
    """Number of each channel that is mapped to 1 for the network; larger numbers are clipped."""
    clipped: tuple[float, ...] = ()
    """Share of the numbers of each channel, in the data set, that are clipped."""
    pixel_size: tuple[float, float] | None = None
    """Height and width of a pixel in micrometres; None if files state none or different ones."""

    @model_validator(mode="after")
    def _fits_together(self) -> Levels:
        bounds = list(zip(self.low, self.high, strict=False))
        if not len(self.low) == len(self.high) == len(self.channels):
            raise ValueError(f"{len(self.channels)} channels have {len(self.low)} lows and {len(self.high)} highs.")
        if not all(-math.inf < low < high < math.inf for low, high in bounds):
            raise ValueError(f"{bounds} are not ranges: each needs two finite numbers, the smaller one first.")
        return self

    def normalise(self, images: Tensor) -> Tensor:
        """Map numbers [B, C, H, W] to float32 in [-1, 1]."""
        numbers = images.float()
        low, high = self._bounds(numbers)
        return ((numbers - low) / (high - low) * 2 - 1).clamp(-1, 1)

    def restore(self, x: Tensor) -> Tensor:
        """Map float [B, C, H, W] in [-1, 1] to numbers of `dtype`, integers rounded to nearest and clipped to those of
        the type; the inverse of `normalise` to half a unit. Contiguous."""
        import torch  # not needed to read a configuration

        x = x.float()
        low, high = self._bounds(x)
        numbers = (x.clamp(-1, 1) + 1) / 2 * (high - low) + low
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            numbers = numbers.round().clamp(limits.min, limits.max)
        return numbers.to(dtype).contiguous()

    def rendered(self, images: Tensor) -> Tensor:
        """Map numbers [B, C, H, W] to float32 from 0 to 255, the range of pictures, for evaluation and for pictures of
        a report. Nothing is rounded."""
        return (self.normalise(images) + 1) * 127.5

    def _bounds(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return numbers.new_tensor(self.low).view(-1, 1, 1), numbers.new_tensor(self.high).view(-1, 1, 1)


def rendered(images: Tensor, levels: Levels | None) -> Tensor:
    """Return images [B, C, H, W] for evaluation and drawing: pictures as uint8, arrays as float32 from 0 to 255."""
    return images if levels is None else levels.rendered(images)
