"""Where tensors live and how precise they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Arriving = Callable[[], Tensor]
"""A tensor on its way: the call waits until it is there, and gives it."""


def best_device() -> torch.device:
    """The GPU this process is to use, or the CPU: torchrun's LOCAL_RANK chooses among several."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device. A GPU copies it from page-locked memory, in its turn, and nobody waits."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def to_host(x: Tensor) -> Arriving:
    """A tensor on the CPU. A GPU copies it when it has computed it, and who asks for it waits."""
    host = x.to("cpu", non_blocking=True)
    if not x.is_cuda:
        return lambda: host
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait
