"""Utilization of a device by a training: operations per second, relative to those of a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.nn.linear import linear, register_operations
from image_diffusion.training.parallel.world import World

LossesOf = Callable[[Examples, int], Losses]
"""Function of examples, and of a number unique to this part of the step, that returns their losses."""

_aten = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Attention on a CPU, which has no formula before PyTorch 2.15, and the operation whose formula is used."""
_SIDES = {"cuda": 8192, "cpu": 512}


class Speed:
    """Rate of a training as a share of its devices' rate. dtype: dtype of the factors of its matrix products."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world, self._dtype = world, dtype
        self._peak, self._flops, self._parts = 0.0, 0, set[str]()

    def values(
        self, examples_per_second: float, examples: Examples, losses_of: LossesOf, parts: set[str]
    ) -> dict[str, float]:
        """Return the values for the journal, in every process. examples: examples of any step. parts: names of the
        parts of the loss, with "loss". If they differ from the previous call, counts the operations of one example,
        whose gradient is added to the network's, and waits for the device."""
        if parts != self._parts:
            self._parts, self._flops = parts, flops_per_example(examples, losses_of)
            self._peak = self._peak or product_rate(self._world.device, self._dtype)
        rate, peak = self._flops * examples_per_second, self._peak
        return {"speed/tflops": rate / 1e12, "speed/share_of_peak": rate / (peak * self._world.size)}


def flops_per_example(examples: Examples, losses_of: LossesOf) -> int:
    """Return the floating-point operations of the loss of one example and of its gradient, including recomputation."""
    counter = _Operations()
    with counter:
        losses_of(examples.split(1)[0], 0).loss.sum().backward()
    return counter.total


class _Operations(TorchDispatchMode):
    """Counts the operations in this context. (PyTorch's `FlopCounterMode` also tracks modules, with hooks that fail if
    a network runs without gradient.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        register_operations()
        self._formulas, self.total = flop_registry, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        count = self._formulas.get(packet) or self._formulas.get(_COUNTED_AS.get(packet))
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@torch.no_grad()
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product, the best of three."""
    side = _SIDES[device.type]
    draw = torch.Generator(device).manual_seed(0)  # equal numbers would draw less power, and run faster
    left, right = (torch.randn(side, side, generator=draw, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / seconds_of(lambda: linear(left, right, None), device, 3)


def seconds_of(compute: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the minimum seconds of `times` runs, each with a synchronisation of the device."""
    seconds = []
    for _ in range(1 + times):  # one to warm up
        _wait(device)
        started = time.perf_counter()
        compute()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
