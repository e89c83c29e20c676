"""Devices of tensors, the precision of computations, and networks as shapes alone on the meta device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

REQUESTED = "IMAGE_DIFFUSION_GPUS"
"""The environment variable with the number of GPUs that the stage has asked for; unset or empty: the CPU will do."""

_DRIVER = Path("/proc/driver/nvidia/version")

Arriving = Callable[[], Tensor]
"""Tensor that is being copied: the call waits for the copy and returns it."""


def best_device() -> torch.device:
    """Return the GPU of this process, or the CPU: torchrun's LOCAL_RANK chooses among several GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def has_gpu() -> bool:
    """Return True if PyTorch can use a GPU. Raises ValueError if the stage has asked for GPUs and PyTorch has none: it
    would compute on the CPU, for days."""
    if torch.cuda.is_available():
        return True
    if not (number := os.environ.get(REQUESTED)):
        return False
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"PyTorch {torch.__version__} is built without CUDA"
    else:
        try:
            torch.cuda.init()
            reason = "it sees no device"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
        reason = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} says: {reason}; {_driver()}"
    raise ValueError(
        f"{number} GPU{'s' * (number != '1')} requested (resources.gpus_per_node), and PyTorch can use none. {reason}. "
        "Install a build for this driver (uv pip install --torch-backend=auto torch), or train on the CPU with "
        "--config gpus_per_node=0."
    )


def _driver() -> str:
    with suppress(OSError):
        if match := re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text()):
            return f"the driver is {match[1]}"
    return "no NVIDIA driver is loaded"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device. A GPU copies it from page-locked memory, in its turn, without blocking the
    caller."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def to_host(x: Tensor) -> Arriving:
    """Copy a tensor to the CPU. A GPU copies it when it has computed it, and the call that asks for it waits."""
    host = x.to("cpu", non_blocking=True)
    if not x.is_cuda:
        return lambda: host
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build networks in this context without memory (torch's meta device) and without drawing their initial values.

    To draw them on the meta device, torch would first import its compiler: two seconds, when Snakemake starts.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Initialisation does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)
