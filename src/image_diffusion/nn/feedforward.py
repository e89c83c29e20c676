"""What a transformer does to each token on its own."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.nn.blocks import of_parts
from image_diffusion.nn.gelu import gelu
from image_diffusion.nn.linear import Linear


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
