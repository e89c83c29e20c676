"""Linear maps by the fastest product of float32 matrices of PyTorch on a CPU.

`torch.nn.functional.linear` calls MKL, which uses only half of the vector units of AVX-512 processors that are not
Intel's. oneDNN, which PyTorch also includes and which computes the same sums, uses all of them and is about twice as
fast. On other processors MKL is faster, by a tenth of a training step. Without gradients oneDNN is used on all
processors, since a row of its products does not depend on the other rows, so that an image does not depend on its
batch. Neither product supports forward-mode derivatives, for which `derivative` uses PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_FEWEST_ROWS = 1 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else 64
"""With fewer rows, oneDNN in older versions of PyTorch uses other kernels, whose last bits differ."""
_WORTH_IT = 2**22  # multiplications: with fewer, a gradient written in Python costs more than it saves


_plain = False  # code compiled by PyTorch 2.11 cannot read a ContextVar


@contextmanager
def plain_products() -> Iterator[None]:
    """Use PyTorch's own products in this context, which support every kind of derivative."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


class Linear(nn.Linear):
    """`torch.nn.Linear` with the same parameters, and the same result except for the order of sums."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> x weight^T + bias, [..., out]."""
    if torch.compiler.is_compiling() or not _HAS_ONEDNN or uses_pytorch_product(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _row_by_row(x, weight, bias)
    if x.numel() * len(weight) < _WORTH_IT or _mkl_is_faster():
        return F.linear(x, weight, bias)
    return _Product.apply(x, weight, bias)


def writes_gelu(x: Tensor) -> bool:
    """Return True if a product of x may write the GELU of its sums instead of the sums: on a GPU, without
    derivatives."""
    return x.is_cuda and not torch.is_grad_enabled() and not _plain


def uses_pytorch_product(x: Tensor) -> bool:
    """Return True if PyTorch's own product is used for x: outside of float32 on a CPU, and in the context
    `plain_products`."""
    return _plain or not _is_float32_on_cpu(x)


@cache
def _mkl_is_faster() -> bool:
    """Return True if MKL uses all vector units of this processor."""
    if not torch.backends.mkl.is_available():
        return False
    return torch.backends.cpu.get_cpu_capability() != "AVX512" or "GenuineIntel" in _processor()


def _processor() -> str:
    """Return Linux's description of the processor; empty on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text() if cpuinfo.is_file() else ""


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product; x and weight may have any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product, computed so that no row depends on other rows."""
    missing = _FEWEST_ROWS - x.numel() // x.shape[-1]
    if missing <= 0:
        return _onednn(x, weight, bias)
    rows = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, missing))
    return _onednn(rows, weight, bias)[:-missing].view(*x.shape[:-1], len(weight))


def register_operations() -> None:
    """Register the operation counts of oneDNN's product, and of a product with GELU, in PyTorch's flop counter, whose
    import takes 0.2 s."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.mkldnn._linear_pointwise not in flop_registry:
        register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_operations)
        register_flop_formula(torch.ops.aten._addmm_activation)(_operations_with_gelu)


def _operations(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _operations_with_gelu(_bias: tuple[int, ...], x: tuple[int, ...], weight: tuple[int, ...], **__: Any) -> int:
    return 2 * math.prod(x) * weight[1]


class _Product(torch.autograd.Function):
    """The product and, by the same kernels, its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()  # [n, out]
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _onednn(rows, weight.t(), None).view_as(x) if of_x else None,
            _onednn(rows.t(), x.reshape(-1, x.shape[-1]).t(), None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def derivative(function: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> Tensor:
    """Return d/ds function(at + s along) at s = 0, without gradient, at the cost of about two calls of the function.
    Networks then use operations that support it: PyTorch's own products, unfused attention, uncompiled code.
    """
    with torch.no_grad(), plain_products(), sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        result: Tensor = torch.func.jvp(function, at, along)[1]
    return result
