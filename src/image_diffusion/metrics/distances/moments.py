"""Mean and covariance of features, in float64, block by block, merged exactly.

Twenty blocks instead of one sum: leaving out one block at a time gives the interval of every Fréchet distance
(jackknife.py). A sample's block depends on its index alone, so neither the batch size nor the number of processes that
computed the features can change a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

NUM_BLOCKS = 20
_BUFFERED_ROWS = 4096


@dataclass(frozen=True)
class Gaussian:
    """Gaussian of a set, for the Fréchet distance. mean: float64 [D]; covariance: float64 [D, D]; count: number of
    rows; None for statistics from a file that does not state it.
    """

    mean: Tensor
    covariance: Tensor
    count: int | None = None

    @property
    def dimension(self) -> int:
        return self.mean.numel()

    @cached_property
    def factor(self) -> Tensor:
        """Return F [D, R] with F F' = covariance and R its numerical rank: Cholesky's factorization.

        A pivot below D eps max is a zero with rounding error, whose root would be 1e-8; in that case complete pivoting
        is used, which stops before such pivots.
        """
        whole: Tensor
        whole, failed = torch.linalg.cholesky_ex(self.covariance)
        noise = self.dimension * torch.finfo(torch.float64).eps * float(self.covariance.diagonal().max())
        if not int(failed) and float(whole.diagonal().square().min()) > noise:
            return whole
        from scipy.linalg.lapack import dpstrf  # here, because it slows the start of a stage

        packed, pivots, rank, _ = dpstrf(self.covariance.numpy(), lower=1)
        lower = np.tril(packed)[:, :rank]
        factor = np.empty_like(lower)
        factor[pivots - 1] = lower
        return torch.from_numpy(factor)


@dataclass(frozen=True)
class Moments:
    """Count, mean (float64 [D]) and m2 = sum of (x - mean)(x - mean)' (float64 [D, D])."""

    count: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def empty(cls, dimension: int) -> Moments:
        """Return the moments of no rows."""
        zero = torch.zeros(dimension, dtype=torch.float64)
        return cls(0, zero, torch.zeros(dimension, dimension, dtype=torch.float64))

    @classmethod
    def from_features(cls, features: Tensor) -> Moments:
        """Return the moments of the rows of a [N, D] tensor, which may be a mapped file: few rows are in memory at a
        time.

        Raises ValueError if a number is not finite.
        """
        return merged(cls._from_rows(rows) for rows in features.split(_BUFFERED_ROWS))

    @classmethod
    def _from_rows(cls, features: Tensor) -> Moments:
        features = check_finite(features).to("cpu", torch.float64)
        if len(features) == 0:
            return cls.empty(features.shape[1])
        mean = features.mean(dim=0)
        centred = features - mean
        return cls(len(features), mean, centred.T @ centred)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows together (Chan, Golub and LeVeque 1983, eq. 2.1)."""
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"Cannot merge features of {self.mean.numel()} and {other.mean.numel()} dimensions.")
        count = self.count + other.count
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else other
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + torch.outer(delta, delta) * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def without(self, part: Moments) -> Moments:
        """Return the moments of the remaining rows after removing a merged part: the inverse of `merge`."""
        count = self.count - part.count
        if part.count == 0:
            return self
        assert count > 0
        mean = self.mean + (self.mean - part.mean) * (part.count / count)
        delta = part.mean - mean
        m2 = self.m2 - part.m2 - torch.outer(delta, delta) * (count * part.count / self.count)
        return Moments(count, mean, m2)

    @property
    def gaussian(self) -> Gaussian:
        """Return mean and unbiased covariance (n - 1). Raises ValueError for fewer than two rows."""
        if self.count < 2:
            raise ValueError(f"A covariance needs at least 2 samples; got {self.count}.")
        return Gaussian(self.mean, self.m2 / (self.count - 1), self.count)


def merged(parts: Iterable[Moments]) -> Moments:
    """Return the merged moments of all parts."""
    return reduce(Moments.merge, parts)


def block_of_each(total: int) -> Tensor:
    """Return the block of every sample, int64 [total]: a fixed random assignment to blocks whose sizes differ by at
    most one."""
    return torch.from_numpy(np.random.default_rng(0).permutation(total) % NUM_BLOCKS)


def block_moments(features: Tensor) -> list[Moments]:
    """Return the moments of each block of a set's rows [N, D]."""
    block = block_of_each(len(features))
    return [Moments.from_features(features[block == number]) for number in range(NUM_BLOCKS)]


def check_finite(features: Tensor) -> Tensor:
    """Return the features. Raises ValueError naming the row if a value is NaN or infinite."""
    if features.dim() != 2:
        raise ValueError(f"Features must have shape [samples, dimension]; got {list(features.shape)}.")
    finite = torch.isfinite(features).all(dim=1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"Features of {int((~finite).sum()):,} of {len(features):,} samples are not finite (first: row {row:,}). "
            "Check the detector's weights and the samples."
        )
    return features
