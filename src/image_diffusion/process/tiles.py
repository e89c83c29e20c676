"""Pictures larger than the network's images: overlapping tiles are predicted separately, and the predictions averaged.

Bar-Tal et al. 2023, "MultiDiffusion: Fusing diffusion paths for controlled image generation": the step of the whole
picture is the weighted mean of the steps of its crops. A sampler's steps are linear in the predictions, so the mean of
the predictions is equivalent. The method leaves the weights open; here they decrease towards the edges of a tile, so
that seams are smooth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size
from image_diffusion.process.base import Denoised, Denoiser


class Tiles(Config):
    """Number of tiles of a picture, and their overlap. Each tile has the size of the network's images."""

    rows: int = Field(1, ge=1)
    """Number of tiles from top to bottom."""
    columns: int = Field(1, ge=1)
    """Number of tiles from left to right."""
    overlap: float = Field(0.5, ge=0, lt=1)
    """Overlap of adjacent tiles, as a share of a tile's side."""

    @property
    def number(self) -> int:
        """Return the number of tiles."""
        return self.rows * self.columns

    def shape(self, size: Size) -> Size:
        """Return the height and width of a picture. size: of a tile."""
        height, width = size
        return height + (self.rows - 1) * self._step(height), width + (self.columns - 1) * self._step(width)

    def joined(self, denoisers: Sequence[Denoiser], size: Size) -> Denoiser:
        """Return the denoiser of whole pictures. denoisers: of each tile, row by row. size: of a tile."""
        if self.number == 1:
            return denoisers[0]
        height, width = size
        corners = [
            (row * self._step(height), column * self._step(width))
            for row in range(self.rows)
            for column in range(self.columns)
        ]
        tiles = [(..., slice(top, top + height), slice(left, left + width)) for top, left in corners]
        weights = self._weights(height)[:, None] * self._weights(width)

        def mean(parts: Sequence[Tensor | None], x: Tensor) -> Tensor | None:
            total, sum_of_weights = torch.zeros_like(x), torch.zeros_like(x)
            for tile, part in zip(tiles, parts, strict=True):
                if part is None:
                    return None
                total[tile] += weights.to(x) * part
                sum_of_weights[tile] += weights.to(x)
            return total / sum_of_weights

        def denoiser(x: Tensor, i: int) -> Denoised:
            parts = [predict(x[tile].contiguous(), i) for predict, tile in zip(denoisers, tiles, strict=True)]
            x0, eps = mean([part.x0 for part in parts], x), mean([part.eps for part in parts], x)
            assert x0 is not None and eps is not None
            log_variance, predicted = mean([part.log_variance for part in parts], x), mean([p.mean for p in parts], x)
            return Denoised(x0, eps, log_variance, predicted)

        return denoiser

    def _step(self, side: int) -> int:
        return side - int(self.overlap * side)

    def _weights(self, side: int) -> Tensor:
        """Return the weights along the side of a tile, which rise from each edge over the overlap. Float64 [side]."""
        from_edge = torch.arange(1, side + 1, dtype=torch.float64)
        overlap = side - self._step(side)
        return (torch.minimum(from_edge, from_edge.flip(0)) / (overlap + 1)).clamp(max=1)
