"""Philox random numbers on a CPU in C (`philox.c`), in one pass from ids to numbers.

Installation compiles it if there is a C compiler. Otherwise PyTorch computes the numbers in more than a hundred small
operations.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from image_diffusion.core.native import library_path, load

Kind = Literal["uniform", "normal", "gumbel", "integers"]


_COMPILED = library_path(__name__, "philox.compiled")  # by setup.py
KINDS: dict[Kind, int] = {"uniform": 0, "normal": 1, "gumbel": 2, "integers": 3}


@cache
def library() -> ctypes.CDLL | None:
    """Load the library that installation compiled; None if it was not compiled."""
    loaded = load(_COMPILED)
    if loaded is not None:
        ids, number = ctypes.c_void_p, ctypes.c_int64
        loaded.draw.argtypes = [
            ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ids, ids, number, number, number, ctypes.c_void_p
        ]  # fmt: skip
        loaded.draw.restype = None
    return loaded


def draw(kind: Kind, key: tuple[int, int], epoch: Tensor, sample: Tensor, count: int, high: int = 1) -> Tensor:
    """Draw [B, count] numbers of epoch and sample, int64 [B], all on the CPU: float32, or int64 below `high` for
    integers. key: two 32-bit words. Needs the library."""
    loaded = library()
    assert loaded is not None
    if epoch.shape != sample.shape:
        epoch = epoch.expand(sample.shape)
    ids = [tensor.to(torch.int64).contiguous() for tensor in (epoch, sample)]  # read by C by address
    out = torch.empty((len(sample), count), dtype=torch.int64 if kind == "integers" else torch.float32)
    at = [tensor.data_ptr() for tensor in ids]
    loaded.draw(KINDS[kind], *key, *at, len(sample), count, high, out.data_ptr())
    return out
