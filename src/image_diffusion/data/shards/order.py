"""Order of the samples: a full shuffle of every epoch that is a pure function of (seed, epoch), of all samples or of
each class.

The stream of samples is the epochs one after another. Step s takes the positions [s G, (s + 1) G) of the stream, G the
global batch, and each rank its contiguous share of them. So every sample occurs once per epoch for any batch size,
number of processes and number of samples; no tail is dropped or padded; and the state is one integer.

With balanced classes the stream is rounds in place of epochs: a round shows every class once, and each class goes
through its own samples, epoch after epoch. So every C examples hold each of C classes once, and no sample recurs before
all others of its class have occurred.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood 2014): one-to-one on 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    return int(_mix(np.array([word & _MASK], dtype=np.uint64))[0])


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the samples in the order of an epoch, int64 [num_samples], sorted by a hash of (seed, epoch, sample).

    The hash is one-to-one in the sample, so ties cannot occur and the order is the same on every machine.
    """
    (order,) = _orders(num_samples, seed, epoch, 1)
    return cast("Indices", order)


def _orders(num_samples: int, seed: int, first: int, count: int) -> Indices:
    """Return the orders of `count` epochs from epoch `first` on, int64 [count, num_samples]."""
    epochs = np.arange(int(first) + 1, int(first) + 1 + count, dtype=np.uint64)
    keys = _mix(np.uint64(_mix_one(int(seed) + _GOLDEN)) + epochs * np.uint64(_GOLDEN))
    words = keys[:, None] + np.arange(num_samples, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(words), axis=1, kind="stable").astype(np.int64, copy=False)


_cached_order = lru_cache(maxsize=2)(epoch_order)


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the contiguous part of the positions [start, stop) that belongs to a rank; sizes differ by one at most."""
    count = stop - start
    return start + count * rank // world_size, start + count * (rank + 1) // world_size


class Shuffled:
    """Stream in which every sample occurs once per epoch."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the samples at the positions [start, stop) of the stream: (sample, epoch), both int64 [stop - start].
        Each (sample, epoch) occurs at one position."""
        samples, epochs = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, first = divmod(start, self._num_samples)
            count = min(stop - start, self._num_samples - first)
            samples.append(_cached_order(self._num_samples, self._seed, epoch)[first : first + count])
            epochs.append(np.full(count, epoch, dtype=np.int64))
            start += count
        return np.concatenate(samples), np.concatenate(epochs)


class Balanced:
    """Stream in which every class occurs once per round, and every sample once per epoch of its class.

    labels: int64 [N], class of each sample. Classes without samples do not occur in a round.
    """

    def __init__(self, labels: Indices, seed: int) -> None:
        by_class = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        self._members = [members for members in np.split(by_class, np.cumsum(counts)[:-1]) if len(members)]
        self._seed = seed
        self._known: dict[int, tuple[int, Indices]] = {}

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the samples at the positions [start, stop) as `Shuffled` does; the epoch is that of the sample's
        class."""
        num_classes = len(self._members)
        rounds, places = np.divmod(np.arange(start, stop), num_classes)
        samples, epochs = np.empty_like(rounds), np.empty_like(rounds)
        if len(rounds):
            first, last = int(rounds[0]), int(rounds[-1])
            classes = _orders(num_classes, self._seed, first, last - first + 1)[rounds - first, places]
            for label in np.unique(classes).tolist():
                mine = classes == label
                epochs[mine], place = np.divmod(rounds[mine], len(self._members[label]))
                begun, orders = self._orders_of(label, int(epochs[mine][0]), int(epochs[mine][-1]))
                samples[mine] = orders[epochs[mine] - begun, place]
        return samples, epochs

    def _orders_of(self, label: int, first: int, last: int) -> tuple[int, Indices]:
        """Return the first cached epoch of a class, and the samples of the class in the order of each cached epoch."""
        cached = self._known.get(label)
        if cached is None or not cached[0] <= first <= last < cached[0] + len(cached[1]):
            members = self._members[label]
            seed = _mix_one(_mix_one(self._seed) + label)
            cached = self._known[label] = first, members[_orders(len(members), seed, first, last - first + 1)]
        return cached
