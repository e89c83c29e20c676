"""Precision of a network outside of training. Computations on its output are always float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from image_diffusion.core.devices import has_bf16
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.core.types import Network

Precision = Literal["float32", "tf32", "bf16"]
"""float32: no rounding. tf32: a GPU rounds the factors of products and convolutions to 10 bits; a CPU does not. bf16:
factors have 8 bits, and operations between products are bf16 as well."""


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set whether a GPU may round the factors of float32 products and convolutions to 10 bits in this context, in the
    whole process. (`torch.set_float32_matmul_precision` would also affect products on a CPU.)"""
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def computes_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Let networks compute in a precision in this context; on a GPU without bf16, in float32, with a message."""
    if precision == "bf16" and not has_bf16(device):
        log_line_once(f"{torch.cuda.get_device_name(device)} has no bf16: networks compute in float32.")
        precision = "tf32"
    with tf32(precision != "float32"), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield


def computing_in(network: Network, precision: Precision) -> Network:
    """Wrap a network to compute in a precision; its inputs and outputs, one tensor or several, have the dtype of x."""

    def call(x: Tensor, t: Tensor, /, **cond: Tensor) -> Any:
        with computes_in(precision, x.device):
            output: Any = network(x, t, **cond)
        return tuple(tensor.to(x.dtype) for tensor in output) if isinstance(output, tuple) else output.to(x.dtype)

    return call
