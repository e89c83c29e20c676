"""Modes of bit-identical training, and the PyTorch settings for them.

off: the fastest kernels. On a GPU two starts may differ in the last bits: cuDNN benchmarks algorithms and takes the one
that was fastest, and the backward pass of attention adds in the order in which its blocks end.

run: the same bytes on the same kind of machine with the same number of processes and threads, also after interruptions.
Neither cuDNN nor torch.compile benchmarks algorithms, and only kernels with a fixed order of sums are used: flash and
memory-efficient attention have such kernels for their backward passes; cuDNN's attention has none and is disabled
(PyTorch's aten/src/ATen/native/transformers/cuda/attention_backward.cu and sdp_utils.cpp).

strict: the same bytes for any number of processes, by adding up chunks of the global batch in order, on one CPU thread
(`gradients.OrderedGradient`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from image_diffusion.nn.precision import tf32

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
