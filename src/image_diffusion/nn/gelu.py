"""GELU in its tanh form, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x³) (Hendrycks and Gimpel 2016,
arXiv:1606.08415, section 2).

PyTorch's kernel for it takes several times as long on a CPU as its other functions of one number. Since
0.5 (1 + tanh u) = sigmoid(2 u), the same comes of its quick sigmoid and some products.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.nn.linear import is_plain

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Tensor) -> Tensor:
    """Of each number, in the shape of x."""
    if is_plain(x):
        return F.gelu(x, approximate="tanh")
    if torch.compiler.is_compiling():
        return x * torch.sigmoid((_LINEAR + _CUBIC * x * x) * x)
    return cast(Tensor, _Gelu.apply(x))


class _Gelu(torch.autograd.Function):
    """The function and its derivative, in as few passes over memory as there can be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = torch.square(x).mul_(_CUBIC).add_(_LINEAR).mul_(x).sigmoid_()
        ctx.save_for_backward(x, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """share + x share (1 - share) (2 u)'."""
        x, share = ctx.saved_tensors
        slope = torch.square(x).mul_(3 * _CUBIC).add_(_LINEAR).mul_(x)  # x (2 u)'
        return cast(Tensor, torch.ops.aten.sigmoid_backward(slope, share).add_(share).mul_(gradient))
