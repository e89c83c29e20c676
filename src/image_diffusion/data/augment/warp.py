"""Affine maps of images: the operations on each image are one matrix, applied by one resampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Affine:
    """Affine maps of images about their centre, float64 [B] each. The maps are applied in the order of the fields.

    log2_scale: binary logarithm of the enlargement. rotation: angle in radians. log2_stretch: binary logarithm of the
    factor of the stretch along `direction`, an angle in radians; the image shrinks across. shift_x, shift_y: shares of
    width and height.
    """

    log2_scale: Tensor
    rotation: Tensor
    log2_stretch: Tensor
    direction: Tensor
    shift_x: Tensor
    shift_y: Tensor

    @property
    def moves(self) -> Tensor:
        """True for the images that the maps change, bool [B]."""
        changes = (self.log2_scale, self.rotation, self.log2_stretch, self.shift_x, self.shift_y)
        return torch.stack(changes).ne(0).any(0)

    def inverse(self) -> Tensor:
        """Return the linear part of the inverse maps, float64 [B, 2, 2]: scale^-1 rotation^-1 stretch^-1."""
        stretch = torch.exp2(-self.log2_stretch)
        across = _turn(self.direction) * torch.stack([stretch, 1 / stretch], -1)[:, None, :]
        along = _product(across, _turn(-self.direction))
        return _product(_turn(-self.rotation), along) * torch.exp2(-self.log2_scale)[:, None, None]


def warp(x: Tensor, maps: Affine) -> Tensor:
    """Return images [B, C, H, W] after their maps: bicubic, reflected at the edges, and clamped to [-1, 1]. An image
    with the identity map keeps its bits. The result for an image does not depend on the rest of the batch.
    """
    height, width = x.shape[-2:]
    ratio = width / height
    inverse = maps.inverse()[:, :, :, None, None]  # [B, 2, 2, 1, 1]
    columns, rows = (_centres(side, x.device) for side in (width, height))
    # In units of half the height along both axes: a rotation by another unit would shear a rectangle.
    column = ((columns[None, None, :] - 2 * maps.shift_x[:, None, None]) * ratio).expand(-1, height, -1)  # [B, H, W]
    row = (rows[None, :, None] - 2 * maps.shift_y[:, None, None]).expand(-1, -1, width)
    along_x, along_y = (inverse[:, i, 0] * column + inverse[:, i, 1] * row for i in range(2))
    grid = torch.stack([along_x / ratio, along_y], -1)  # [B, H, W, 2]
    moved = F.grid_sample(x, grid.to(x.dtype), mode="bicubic", padding_mode="reflection", align_corners=False)
    return torch.where(maps.moves[:, None, None, None], moved.clamp(-1, 1), x)


def _centres(side: int, device: torch.device) -> Tensor:
    """Return the centres of the pixels along a side, from -1 to 1. Float64 [side]."""
    return (2 * torch.arange(side, dtype=torch.float64, device=device) + 1) / side - 1


def _turn(angle: Tensor) -> Tensor:
    """Return the rotation by an angle [B] in radians, [B, 2, 2]."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of matrices [B, 2, 2], batch element by batch element."""
    return left[:, :, :1] * right[:, :1, :] + left[:, :, 1:] * right[:, 1:, :]
