"""The random numbers of `core/streams.py` on a CPU, compiled (`draws.c`): one pass that reads ids and writes numbers.

Installing the package compiles it where there is a C compiler. Elsewhere PyTorch draws, with more than a hundred small
operations for what is written once there.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from image_diffusion.core.compiled import beside, load
from image_diffusion.core.streams import Kind

_COMPILED = beside(__name__, "draws.compiled")  # by setup.py
_KINDS: dict[Kind, int] = {"uniform": 0, "normal": 1, "gumbel": 2, "integers": 3}


@cache
def library() -> ctypes.CDLL | None:
    """What installing the package compiled; None where it did not."""
    loaded = load(_COMPILED)
    if loaded is not None:
        ids, number = ctypes.c_void_p, ctypes.c_int64
        loaded.draw.argtypes = [
            ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ids, ids, number, number, number, ctypes.c_void_p
        ]  # fmt: skip
        loaded.draw.restype = None
    return loaded


def draw(kind: Kind, key: tuple[int, int], epoch: Tensor, sample: Tensor, count: int, high: int = 1) -> Tensor:
    """[B, count] of epoch and sample, int64 [B], all on the CPU: float32, or int64 below `high` for integers. key: two
    32-bit words. Needs the library."""
    loaded = library()
    assert loaded is not None
    if epoch.shape != sample.shape:
        epoch = epoch.expand(sample.shape)
    ids = [each.to(torch.int64).contiguous() for each in (epoch, sample)]  # what C reads by address
    out = torch.empty((len(sample), count), dtype=torch.int64 if kind == "integers" else torch.float32)
    at = [each.data_ptr() for each in ids]
    loaded.draw(_KINDS[kind], *key, *at, len(sample), count, high, out.data_ptr())
    return out
