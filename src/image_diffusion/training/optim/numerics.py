"""Numerics of a training: its modes of bit-identical results with the PyTorch settings for them, and its precision.

off: the fastest kernels. On a GPU two starts may differ in the last bits: cuDNN benchmarks algorithms and takes the one
that was fastest, and the backward pass of attention adds in the order in which its blocks end.

run: the same bytes on the same kind of machine with the same number of processes and threads, also after interruptions.
Neither cuDNN nor torch.compile benchmarks algorithms, and only kernels with a fixed order of sums are used: flash and
memory-efficient attention have such kernels for their backward passes; cuDNN's attention has none and is disabled
(PyTorch's aten/src/ATen/native/transformers/cuda/attention_backward.cu and sdp_utils.cpp).

strict: the same bytes for any number of processes, by adding up chunks of the global batch in order, on one CPU thread
(`gradients.OrderedGradient`).

Weights, gradients, moments and averages are float32 in every precision.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional as F

from image_diffusion.core.devices import has_bf16, multiplies_bf16
from image_diffusion.nn.precision import tf32
from image_diffusion.training.monitor.meter import product_rate

Mode = Literal["off", "run", "strict"]

_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def switches(deterministic: Mode, allow_tf32: bool, compiled: bool) -> Iterator[None]:
    """Set PyTorch's global flags for a training, and restore them afterwards. Enter it before the first product on a
    GPU, when cuBLAS chooses its workspaces.

    allow_tf32: True if float32 products on a GPU may use TF32. compiled: True if the training uses torch.compile. In
    the modes that need a fixed order, raises ValueError for an operation without a kernel of fixed order, or for a
    version of PyTorch that cannot fix the order of compiled kernels.
    """
    fixed = deterministic != "off"
    with ExitStack() as restored:
        restored.enter_context(tf32(allow_tf32))
        _keep_flags(restored)
        torch.backends.cudnn.benchmark = not fixed
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
        torch.use_deterministic_algorithms(fixed)
        if fixed and _WORKSPACES not in os.environ:
            os.environ[_WORKSPACES] = ":4096:8"
            restored.callback(os.environ.pop, _WORKSPACES, None)
        if fixed and compiled:
            from torch._inductor import config as inductor  # takes seconds

            if not hasattr(inductor, "deterministic"):
                raise ValueError(
                    f"train.deterministic is {deterministic} and the training is compiled, but PyTorch "
                    f"{torch.__version__} cannot fix which kernels it compiles. Use PyTorch 2.10 or newer, or set "
                    f"train.deterministic to off."
                )
            restored.enter_context(inductor.patch(deterministic=True))
        if deterministic == "strict":
            restored.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        try:
            yield
        except RuntimeError as error:
            if not fixed or "deterministic implementation" not in str(error):
                raise
            raise ValueError(
                f"train.deterministic is {deterministic}, but {str(error).split(' does not have')[0]} has no "
                f"kernel with a fixed order of sums on this device. Set train.deterministic to off, or do without it."
            ) from error


def _keep_flags(restored: ExitStack) -> None:
    """Restore PyTorch's flags at the end."""
    restored.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    memory = torch.utils.deterministic
    restored.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)  # type: ignore[attr-defined]
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    restored.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)


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


def faster_precision(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a line on the precision that is faster than a training's on this device; None if there is none.

    On a GPU, measures a large matrix product in float32 and in bf16, which takes a tenth of a second.
    """
    if dtype == torch.bfloat16 and not multiplies_bf16(device):
        return (
            "train.precision is bf16, in which PyTorch multiplies matrices number by number on a CPU without AVX-512. "
            "train.precision: float32 is faster on this machine."
        )
    if dtype != torch.float32 or device.type != "cuda" or not has_bf16(device):
        return None
    now, then = (product_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    if then < 1.2 * now:
        return None
    return (
        f"train.precision is float32, in which this GPU does {now / 1e12:.0f} TFLOP/s; in bf16 it does "
        f"{then / 1e12:.0f}. train.precision: bf16 trains most networks as well, and faster."
    )
