"""Random numbers keyed by (seed, epoch, sample id, purpose), and independent of rank and batch.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), evaluated for a
whole batch at once on the batch's own device: on a GPU by one kernel (`philox_gpu.py`), on a CPU by compiled code
(`philox_cpu.py`), or by PyTorch's integer tensors, with the same words. It has no state: the same key always gives the
same numbers, so that nothing must be saved for a restart. The streams of a generated image have its seed as sample id,
so its numbers do not depend on the batch, the device or the order of images.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from image_diffusion.core.process.errors import log_line
from image_diffusion.core.random.philox_cpu import Kind

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class Streams:
    """The random numbers of a batch of samples. seed: seed of the run. epoch, sample: int64 [B], pass over the data and
    sample id of each row.
    """

    seed: int
    epoch: Tensor
    sample: Tensor

    def uniform(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Float32 [B, *shape], uniform in [0, 1): multiples of 2^-24."""
        return self._draw("uniform", purpose, shape)

    def normal(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Float32 [B, *shape], standard normal, by Box and Muller's transform.

        Computed in float64 and rounded once, so that the numbers do not depend on the memory layout of the batch.
        """
        return self._draw("normal", purpose, shape)

    def gumbel(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Float32 [B, *shape], standard Gumbel: -log(-log u). Computed in float64 and rounded once."""
        return self._draw("gumbel", purpose, shape)

    def integers(self, purpose: str, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        """Int64 [B, *shape], uniform in 0 … high - 1, high at most 2^31 (Lemire's multiply-shift)."""
        return self._draw("integers", purpose, shape, high)

    def event(self, purpose: str, probability: float) -> Tensor:
        """Bool [B]: true with the given probability, independently for each sample."""
        return self.uniform(purpose) < probability

    def fork(self, purpose: str) -> Streams:
        """Return streams of the same samples that are independent of these streams and of forks for other purposes."""
        digest = hashlib.sha256(f"{self.seed}/{purpose}".encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:8], "little"))

    def _draw(self, kind: Kind, purpose: str, shape: tuple[int, ...], high: int = 1) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{purpose}".encode()).digest()
        key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
        draw = _drawing(self.sample)
        return draw(kind, key, self.epoch, self.sample, math.prod(shape), high).view(len(self.sample), *shape)


def _drawing(sample: Tensor) -> Callable[..., Tensor]:
    """Return the function that draws on the device of the samples' ids. It is not the C code for tensors without
    contents, which have no memory."""
    if sample.device.type == "cuda":
        return _by_kernel()
    return _by_compiled() if sample.device.type == "cpu" and type(sample) is Tensor else _by_pytorch


def _by_pytorch(kind: Kind, key: tuple[int, int], epoch: Tensor, sample: Tensor, count: int, high: int) -> Tensor:
    """Draw [B, count] numbers by a hundred small operations."""
    if kind == "normal":
        words = _words(key, epoch, sample, 2 * ((count + 1) // 2)).to(torch.float64)
        first, second = words[:, 0::2], words[:, 1::2]
        radius = torch.sqrt(-2.0 * torch.log((first + 0.5) * 2.0**-32))
        angle = second * (2.0 * math.pi * 2.0**-32)
        pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=2).flatten(1)
        return pairs[:, :count].to(torch.float32).reshape(len(sample), count)
    words = _words(key, epoch, sample, count)
    if kind == "uniform":
        return (words >> 8).to(torch.float32) * 2.0**-24
    if kind == "gumbel":
        return -torch.log(-torch.log((words.to(torch.float64) + 0.5) * 2.0**-32)).to(torch.float32)
    return (words * high) >> 32


@cache
def _by_compiled() -> Callable[..., Tensor]:
    """Draw identical numbers by compiled code, if installation has compiled it."""
    from image_diffusion.core.random import philox_cpu

    return _by_pytorch if philox_cpu.library() is None else philox_cpu.draw


@cache
def _by_kernel() -> Callable[..., Tensor]:
    """Draw identical numbers by one kernel; by PyTorch, with a message, if Triton is missing or finds no compiler."""
    try:
        from image_diffusion.core.random.philox_gpu import draw

        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        draw("uniform", (0, 0), ids, ids, 1)
    except Exception as error:  # for any error there is a fallback
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log_line(f"warning: Triton is not available, so that random numbers are drawn slowly: {reason}")
        return _by_pytorch
    return draw


def _words(key: tuple[int, int], epoch: Tensor, sample: Tensor, count: int) -> Tensor:
    """Int64 [B, count] holding uniform 32-bit words."""
    lanes = torch.arange((count + 3) // 4, device=sample.device, dtype=torch.int64)
    rows, columns = sample.numel(), lanes.numel()
    counter = (
        lanes.expand(rows, columns),
        (epoch & _MASK).unsqueeze(1).expand(rows, columns),
        (sample & _MASK).unsqueeze(1).expand(rows, columns),
        ((sample >> 32) & _MASK).unsqueeze(1).expand(rows, columns),
    )
    return torch.stack(philox4x32(counter, key), dim=2).flatten(1)[:, :count]


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Compute ten rounds of Philox4x32. Four int64 tensors of one shape holding 32-bit words in, four of them out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words overflows int64, but its 64 bits are correct: mask each half.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def image_streams(seeds: Tensor, seed: int = 0) -> Streams:
    """Return the streams of images to be made. seeds: int64 [B], one per image; seed: shared by all."""
    return Streams(seed=seed, epoch=torch.zeros_like(seeds), sample=seeds)


def initial_noise(streams: Streams, shape: tuple[int, ...]) -> Tensor:
    """Draw the initial noise of images, float32 [B, *shape], standard normal: x = sigma_0 * noise."""
    return streams.normal("initial_noise", shape)


def step_noise(streams: Streams, step: int, x: Tensor) -> Tensor:
    """Draw standard normal numbers in the shape and type of x [B, ...], which step number `step` adds to the images."""
    return at_step(streams, step).normal("sampler", tuple(x.shape[1:])).to(x)


def at_step(streams: Streams, step: int) -> Streams:
    """Return the streams of a step, one for each image."""
    return replace(streams, epoch=torch.full_like(streams.sample, step))
