"""The random numbers of `core/random/streams.py` on a GPU, with one kernel for each draw.

PyTorch has no unsigned 32-bit products, and takes about 130 kernels on 64-bit tensors for the same result. The words
are bit-identical to those of `streams.philox4x32`, and are converted to numbers in the same way.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from image_diffusion.core.random.philox_cpu import KINDS, Kind

_LANES = 256  # counters evaluated by a program; each gives four words
_UNIFORM, _NORMAL, _GUMBEL, _INTEGERS = (tl.constexpr(number) for number in KINDS.values())
_TURN = tl.constexpr(2.0 * math.pi * 2.0**-32)


def draw(kind: Kind, key: tuple[int, int], epoch: Tensor, sample: Tensor, count: int, high: int = 1) -> Tensor:
    """Draw [B, count] numbers on the device of epoch and sample, int64 [B]: float32, or int64 below `high` for
    integers.

    key: two 32-bit words.
    """
    rows, lanes = sample.numel(), -(-count // 4)
    dtype = torch.int64 if kind == "integers" else torch.float32
    out = torch.empty((rows, count), dtype=dtype, device=sample.device)
    if out.numel():
        seed = key[0] | key[1] << 32
        seed -= (seed >> 63) << 64  # the same bits as a signed number
        grid = (triton.cdiv(rows * lanes, _LANES),)
        arguments = epoch.contiguous(), sample.contiguous(), seed, high, count, lanes, rows
        _draw[grid](out, *arguments, KINDS[kind], _LANES, enable_fp_fusion=False)  # rounded as on a CPU
    return out


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["seed", "high", "lanes", "rows"]
)
def _draw(  # type: ignore[no-untyped-def]
    out, epoch, sample, seed, high, count, lanes, rows, KIND: tl.constexpr, LANES: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    row, lane = number // lanes, number % lanes
    is_real = row < rows
    epoch_of = tl.load(epoch + row, mask=is_real, other=0)
    sample_of = tl.load(sample + row, mask=is_real, other=0)
    counter = lane.to(tl.uint32), epoch_of.to(tl.uint32), sample_of.to(tl.uint32), (sample_of >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter[0], counter[1], counter[2], counter[3])
    if KIND == _NORMAL:
        first_radius, first_angle = _radius(w0), w1.to(tl.float64) * _TURN
        second_radius, second_angle = _radius(w2), w3.to(tl.float64) * _TURN
        v0 = (first_radius * tl.cos(first_angle)).to(tl.float32)
        v1 = (first_radius * tl.sin(first_angle)).to(tl.float32)
        v2 = (second_radius * tl.cos(second_angle)).to(tl.float32)
        v3 = (second_radius * tl.sin(second_angle)).to(tl.float32)
    else:
        v0, v1, v2, v3 = (
            _from_word(w0, high, KIND),
            _from_word(w1, high, KIND),
            _from_word(w2, high, KIND),
            _from_word(w3, high, KIND),
        )
    values = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [LANES, 4])  # v0, v1, v2, v3
    place = (4 * lane)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + (row * count)[:, None] + place, values, mask=is_real[:, None] & (place < count))


@triton.jit  # type: ignore[untyped-decorator]
def _from_word(word, high, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert one word to a number."""
    if KIND == _UNIFORM:
        value = (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    elif KIND == _GUMBEL:
        value = (-tl.log(-tl.log(_inside(word)))).to(tl.float32)
    else:
        value = ((word.to(tl.uint64) * high.to(tl.uint64)) >> 32).to(tl.int64)
    return value


@triton.jit
def _inside(word):  # type: ignore[no-untyped-def]
    """Convert a word to a number in the open interval (0, 1)."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _radius(word):  # type: ignore[no-untyped-def]
    """Compute the radius of the Box-Muller transform."""
    return tl.sqrt(-2.0 * tl.log(_inside(word)))
