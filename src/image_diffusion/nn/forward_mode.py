"""Derivatives of a network along a direction, by one pass forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from image_diffusion.nn.linear import plain_products


def derivative(function: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> Tensor:
    """d/ds function(at + s along) at s = 0, without a gradient of its own; it costs about two calls of the function.

    Inside, networks take products, attention and code that have such derivatives: PyTorch's own, unfused, uncompiled.
    """
    with torch.no_grad(), plain_products(), sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        result: Tensor = torch.func.jvp(function, at, along)[1]
    return result
