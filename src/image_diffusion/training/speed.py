"""How much of what a device can do a training makes use of: operations, counted, over those of a large product."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from image_diffusion.data.batches import Examples
from image_diffusion.nn.linear import linear
from image_diffusion.training.parts import Parts

_SIDES = {"cuda": 8192, "cpu": 1024}


class Speed:
    """The rate of a training as a share of its devices'. Measures at the first `values`, which waits for the device."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._measured: tuple[int, float] | None = None

    def values(self, examples: Examples, examples_per_second: float) -> dict[str, float]:
        """For the journal. examples: some of any step; one of them is used."""
        if self._measured is None:
            self._measured = flops_per_example(self._parts, examples), product_rate(self._parts)
        flops, peak = self._measured
        rate = flops * examples_per_second
        return {"speed/tflops": rate / 1e12, "speed/share_of_peak": rate / (peak * self._parts.world.size)}


def flops_per_example(parts: Parts, examples: Examples) -> int:
    """Floating-point operations of the loss of one example and of its gradient, recomputed ones as well.

    Leaves the gradient of that example in the network's.
    """
    with FlopCounterMode(display=False) as counter, parts.eagerly():
        parts.losses(0, examples.split(1)[0], 0).loss.sum().backward()
    return int(counter.get_total_flops())


@torch.no_grad()
def product_rate(parts: Parts) -> float:
    """Operations a second of a large matrix product in the precision of the network: the best of three."""
    device = parts.world.device
    side = _SIDES[device.type]
    left, right = (torch.ones(side, side, device=device, dtype=parts.precision.dtype) for _ in range(2))
    seconds = []
    for _ in range(4):  # one to warm up
        _wait(device)
        started = time.perf_counter()
        linear(left, right, None)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2.0 * side**3 / min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
