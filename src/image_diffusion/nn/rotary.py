"""Rotary positions on a grid: each pair of a head's channels turns by an angle that grows with the row or the column.

Su et al. 2021, "RoFormer", equations 12 and 34: the product of a query and a key then depends on the difference of
their positions alone. On a grid, the first half of the channels turns by the row and the second by the column, as in
EVA-02 (Fang et al. 2023) and JiT (Li and He 2025). Tokens without a place do not turn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(head_width: int, size: int, device: torch.device, max_period: float = 10_000.0) -> Tensor:
    """Float32 [size², head_width / 2]: by how much each pair of channels turns in each cell of a square grid, row by
    row, in radians. head_width is divisible by 4; pair i of a half turns by p max_period^(-4 i / head_width)."""
    quarter = head_width // 4
    omega = max_period ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)  # [d / 4]
    line = torch.arange(size, dtype=torch.float32, device=device)[:, None] * omega  # [size, d / 4]
    row = line[:, None, :].expand(size, size, -1)
    column = line[None, :, :].expand(size, size, -1)
    return torch.cat([row, column], dim=2).flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Queries or keys [..., N, d], each pair of channels turned by its angle [N, d / 2], in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # each [..., N, d / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
