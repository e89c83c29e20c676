"""Images as sequences of square patches, and back. A patch is flattened as (row, column, channel)."""

from __future__ import annotations

from torch import Tensor


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, H, W] -> [B, N, patch · patch · C], the N = (H / patch)(W / patch) patches row by row."""
    B, C, H, W = x.shape
    x = x.reshape(B, C, H // patch, patch, W // patch, patch)
    x = x.permute(0, 2, 4, 3, 5, 1)  # [B, H/p, W/p, p, p, C]
    return x.reshape(B, (H // patch) * (W // patch), patch * patch * C)


def unpatchify(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """[B, N, patch · patch · C] -> [B, C, height, width]: the inverse of `patchify`."""
    B = tokens.shape[0]
    x = tokens.reshape(B, height // patch, width // patch, patch, patch, -1)
    x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, H/p, p, W/p, p]
    return x.reshape(B, -1, height, width)
