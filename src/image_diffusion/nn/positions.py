"""Positions and times as sines and cosines (Vaswani et al. 2017, "Attention is all you need", section 3.5), and rotary
positions of queries and keys.

Rotary positions rotate each pair of a head's channels by an angle proportional to the row or the column (Su et al.
2021, "RoFormer", equations 12 and 34). The product of a query and a key then depends only on the difference of their
positions. On a grid, the first half of the channels is rotated by the row and the second by the column, as in EVA-02
(Fang et al. 2023) and JiT (Li and He 2025). Tokens without a position are not rotated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.resolution import Size, height_width

MAX_PERIOD = 10_000.0


def sinusoid(t: Tensor, dim: int, endpoint: bool = False) -> Tensor:
    """Times [B] -> float32 [B, dim]: [cos(t ω) | sin(t ω)], and a column of zeros when `dim` is odd.

    ω falls geometrically from 1 towards 1 / MAX_PERIOD over half = dim // 2 values: ω_i = MAX_PERIOD^(-i / half), as
    in improved-diffusion, guided-diffusion and DiT. With `endpoint` the last one is 1 / MAX_PERIOD itself:
    ω_i = MAX_PERIOD^(-i / (half - 1)), as in diffusers.
    """
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=t.device)
    omega = torch.exp(-math.log(MAX_PERIOD) * steps / (half - 1 if endpoint else half))  # [half]
    angle = t[:, None].float() * omega  # [B, half]
    embedding = torch.cat([torch.cos(angle), torch.sin(angle)], dim=1)  # [B, 2 half]
    return F.pad(embedding, (0, dim - 2 * half))


def grid_positions(dim: int, size: int | Size) -> Tensor:
    """Return the position embedding of each cell of a grid, row by row, float32 [H · W, dim]. size: H and W; one number
    for both. `dim` is divisible by 4.

    The first half of the channels encodes the column, the second the row; each is [sin(p ω) | cos(p ω)] with
    ω_i = MAX_PERIOD^(-i / (dim / 4)) (He et al. 2022, "Masked autoencoders", as DiT uses it). Computed in float64 on
    the CPU, so that it is bit-identical on all devices.
    """
    quarter = dim // 4
    omega = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)  # [dim / 4]
    rows, columns = height_width(size)
    angle = torch.arange(max(rows, columns), dtype=torch.float64, device="cpu")[:, None] * omega  # [max(H, W), dim / 4]
    line = torch.cat([torch.sin(angle), torch.cos(angle)], dim=1)  # [max(H, W), dim / 2]
    column = line[None, :columns].expand(rows, columns, -1)
    row = line[:rows, None].expand(rows, columns, -1)
    return torch.cat([column, row], dim=2).flatten(0, 1).float()


def rotary_angles(head_width: int, size: int | Size, device: torch.device) -> Tensor:
    """Return the rotation angle of each pair of channels for each cell of a grid, row by row, in radians, float32
    [H · W, head_width / 2]. size: H and W. head_width is divisible by 4; the angle of pair i of a half is
    p MAX_PERIOD^(-4 i / head_width)."""
    quarter = head_width // 4
    omega = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)  # [d / 4]
    rows, columns = height_width(size)
    line = torch.arange(max(rows, columns), dtype=torch.float32, device=device)[:, None] * omega  # [max(H, W), d / 4]
    row = line[:rows, None].expand(rows, columns, -1)
    column = line[None, :columns].expand(rows, columns, -1)
    return torch.cat([row, column], dim=2).flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate queries or keys [..., N, d]: each pair of channels by its angle [N, d / 2], in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # each [..., N, d / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def check_rope(width: int, num_heads: int) -> None:
    """Raise ValueError if rotary positions of two dimensions do not fit the channels of a head."""
    if width // num_heads % 4:
        raise ValueError(
            f"rope turns pairs of channels for row and column, but width {width} over num_heads {num_heads} leaves "
            f"{width // num_heads} a head, which 4 does not divide. Use other num_heads, or set rope to false."
        )
