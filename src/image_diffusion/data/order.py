"""Which sample comes when: a full shuffle of every epoch that is a pure function of (seed, epoch).

The stream of samples is the epochs one after another. Step s takes the positions [s G, (s + 1) G) of the stream, G
the global batch, and each rank its contiguous share of them. So every sample comes once an epoch whatever the batch,
the number of processes and the number of samples; no tail is dropped or padded; and the state is one integer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): one-to-one on 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    return int(_mix(np.array([word & _MASK], dtype=np.uint64))[0])


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Int64 [num_samples]: the samples in the order of an epoch, sorted by a hash of (seed, epoch, sample).

    The hash is one-to-one in the sample, so there are no ties and the order is the same on every machine.
    """
    key = _mix_one(_mix_one(int(seed) + _GOLDEN) + (int(epoch) + 1) * _GOLDEN)
    words = np.arange(num_samples, dtype=np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(key)
    return np.argsort(_mix(words), kind="stable").astype(np.int64, copy=False)


_cached_order = lru_cache(maxsize=2)(epoch_order)


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous part of the positions [start, stop) that belongs to a rank; sizes differ by one at most."""
    count = stop - start
    return start + count * rank // world_size, start + count * (rank + 1) // world_size


def at_positions(start: int, stop: int, num_samples: int, seed: int) -> tuple[Indices, Indices]:
    """What stands at the positions [start, stop) of the stream: (sample, epoch), both int64 [stop - start]."""
    samples: list[Any] = []
    epochs: list[Any] = []
    while start < stop:
        epoch, first = divmod(start, num_samples)
        count = min(stop - start, num_samples - first)
        samples.append(_cached_order(num_samples, seed, epoch)[first : first + count])
        epochs.append(np.full(count, epoch, dtype=np.int64))
        start += count
    if not samples:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(samples), np.concatenate(epochs)
