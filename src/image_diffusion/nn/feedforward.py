"""What a transformer does to each token on its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.nn.blocks import of_parts
from image_diffusion.nn.linear import Linear, is_plain

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form: 0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x³) (Hendrycks and Gimpel 2016,
    arXiv:1606.08415, section 2).

    0.5 (1 + tanh u) is sigmoid(2 u), which compiled code has on a CPU for a fraction of what tanh takes.
    """
    if torch.compiler.is_compiling() and not is_plain(x):
        return x * torch.sigmoid((_LINEAR + _CUBIC * x * x) * x)
    return F.gelu(x, approximate="tanh")


class Mlp(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class SwiGlu(nn.Module):
    """(SiLU(x W1) * x W2) W3 (Shazeer 2020, "GLU variants improve transformer", equation 6), with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = of_parts(Linear(width, 2 * hidden), 2)
        self.w3 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        gate, value = self.w12(x).chunk(2, dim=-1)  # each [..., hidden]
        out: Tensor = self.w3(F.silu(gate) * value)
        return out
