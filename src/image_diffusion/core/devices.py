"""Devices of tensors, copies between them, and networks without contents on the meta device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from image_diffusion.core.process.errors import log_line

REQUESTED = "IMAGE_DIFFUSION_GPUS"
"""Environment variable with the number of GPUs that the stage requests; unset or empty: the CPU suffices."""

_DRIVER = Path("/sys/module/nvidia/version")
_FITTING_BUILD = "Install a build that fits (uv pip install --torch-backend=auto torch)"
_BUILT_FOR = re.compile(r"(sm|compute)_(\d+)[af]?$")

Arriving = Callable[[], Tensor]
"""Function that waits for a copy in progress and returns the tensor."""


def best_device() -> torch.device:
    """Return the GPU of this process, after printing a line on it, or else the CPU. Raises ValueError as `has_gpu` and
    `check_kernels` do."""
    if not has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    _introduce(device)
    return device


def has_gpu() -> bool:
    """Return True if PyTorch can use a GPU. Raises ValueError if the stage requests GPUs and PyTorch has none, since
    computing on the CPU could take days."""
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
        loaded = f"the driver is {driver()}" if driver() else "no NVIDIA driver is loaded"
        reason = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} says: {reason}; {loaded}"
    raise ValueError(
        f"{number} GPU{'s' * (number != '1')} requested (resources.gpus_per_node), and PyTorch can use none. {reason}. "
        f"{_FITTING_BUILD}, or train on the CPU with --config gpus_per_node=0."
    )


def check_kernels(device: torch.device) -> None:
    """Raise ValueError if this build of PyTorch has no kernels for the GPU. CUDA's binaries of a capability run on its
    later minor versions, and its PTX on every later capability (CUDA C++ Programming Guide, 3.1.2 and 3.1.3)."""
    if torch.version.hip is not None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    built = [match.groups() for name in torch.cuda.get_arch_list() if (match := _BUILT_FOR.match(name))]
    fits = [
        (kind == "compute" or int(number) // 10 == major) and int(number) <= 10 * major + minor
        for kind, number in built
    ]
    if built and not any(fits):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has the compute capability {major}.{minor}, and PyTorch "
            f"{torch.__version__} is built for {' '.join(torch.cuda.get_arch_list())}. {_FITTING_BUILD}, or take "
            "another GPU (CUDA_VISIBLE_DEVICES)."
        )


def has_bf16(device: torch.device) -> bool:
    """Return False if the device is this process's GPU and only emulates bfloat16, as GPUs before Ampere (2020) do."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def multiplies_bf16(device: torch.device) -> bool:
    """Return False for CPUs on which PyTorch multiplies bfloat16 matrices number by number: those without AVX-512."""
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def driver() -> str:
    """Return the version of NVIDIA's driver, empty without one."""
    with suppress(OSError):
        return _DRIVER.read_text().strip()
    return ""


@cache
def _introduce(device: torch.device) -> None:
    """Check a GPU and print a line on it, once per process, with its free memory."""
    check_kernels(device)
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    version = f" (driver {driver()})" if driver() else ""
    name = torch.cuda.get_device_name(device)
    log_line(f"{name}{version}: {free:.1f} of {total:.1f} GiB of memory are free.")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device. A GPU copies it from page-locked memory, in the order of its stream,
    without blocking the caller."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def to_host(x: Tensor) -> Arriving:
    """Copy a tensor to the CPU. A GPU copies it in the background, and the returned function waits for the copy."""
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
    """Build networks in this context without memory (torch's meta device) and without initial values. Initialisation on
    the meta device would import torch's compiler, which takes two seconds when Snakemake starts.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Mode in which initialisation functions do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)
