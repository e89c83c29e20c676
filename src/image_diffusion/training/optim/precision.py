"""Precision of the computations of a step. Weights, gradients, moments and averages are always float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional as F

from image_diffusion.core.devices import has_bf16
from image_diffusion.training.monitor.throughput import product_rate

Name = Literal["float32", "bf16", "fp16"]

DTYPES: dict[Name, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and, for fp16, an adaptive loss scale that does not wait for the device.

    dtype: dtype of the factors of a matrix product. scaler: scaler of the loss, disabled in precisions other than fp16.
    sees_all: True if each process has the gradient of all parameters; if False, processes exchange overflows.
    keeps_weights: True if the network keeps its weights in memory between passes. If they are gathered for each pass,
    autocast does not cache rounded weights, which would remain in memory after the weights are freed.
    """

    def __init__(self, name: Name, device: torch.device, sees_all: bool = True, keeps_weights: bool = True) -> None:
        self.dtype = DTYPES[name]
        self._device, self._caches = device, keeps_weights and _cache_keeps_gradients()
        kind = torch.amp.GradScaler if sees_all else _Agreeing
        self.scaler = kind(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the network's forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype, cache_enabled=self._caches)

    @property
    def skips_overflow(self) -> bool:
        """True if a step whose gradient is not finite is skipped as an overflow, instead of failing."""
        return self.scaler.is_enabled()


def _cache_keeps_gradients() -> bool:
    """Return False if a weight that autocast rounded and cached in a pass without gradient gets none from a later pass,
    as in PyTorch 2.9 (its issues 112583 and 158232): objectives with such a first pass would lose gradients."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            F.linear(weight.detach(), weight)
        return F.linear(weight.detach(), weight).requires_grad


class _Agreeing(torch.amp.GradScaler):
    """Gradient scaler that shares overflows among all processes. (PyTorch's `ShardedGradScaler` fails with fused Adam,
    whose step count has no dimension.)"""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale. All processes do so together."""
        super().unscale_(optimizer)
        if self.is_enabled():
            for overflow in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(overflow)


def faster_in_bf16(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a line on the speed that a float32 training on this GPU would gain from bf16; None without a gain.

    Measures a large matrix product in both precisions, which takes a tenth of a second.
    """
    if dtype != torch.float32 or device.type != "cuda" or not has_bf16(device):
        return None
    now, then = (product_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    if then < 1.2 * now:
        return None
    return (
        f"train.precision is float32, in which this GPU does {now / 1e12:.0f} TFLOP/s; in bf16 it does "
        f"{then / 1e12:.0f}. train.precision: bf16 trains most networks as well, and faster."
    )
