"""In which numbers a network computes where it is not trained. What is done with its output is float32 always."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from image_diffusion.core.types import Network

Precision = Literal["float32", "tf32", "bf16"]
"""float32: as it says. tf32: a GPU rounds the factors of products and convolutions to 10 bits, a CPU does not. bf16:
factors have 8 bits, and what lies between the products is bf16 as well."""


def use_tf32(allowed: bool) -> None:
    """Whether a GPU may round the factors of float32 products and convolutions to 10 bits, in the whole process. (What
    `torch.set_float32_matmul_precision` says holds for the products of a CPU as well.)"""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """The same meanwhile."""
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    use_tf32(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def computes_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Meanwhile networks compute in a precision."""
    with tf32(precision != "float32"), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield


def computing_in(network: Network, precision: Precision) -> Network:
    """The network, computing in a precision; what it is given and what it gives, one tensor or several, is of the type
    of x."""

    def call(x: Tensor, t: Tensor, /, **cond: Tensor) -> Any:
        with computes_in(precision, x.device):
            found: Any = network(x, t, **cond)
        return tuple(each.to(x.dtype) for each in found) if isinstance(found, tuple) else found.to(x.dtype)

    return call
