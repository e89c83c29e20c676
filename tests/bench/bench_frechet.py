"""The Fréchet distance at Inception's 2048 dimensions: seconds and error beside `scipy.linalg.sqrtm`.

    python tests/bench/bench_frechet.py --rounds 3

The truth needs no root: for S2 = T S1 T with T positive definite, tr (S1 S2)^½ = tr(T S1). The other case has fewer
samples than dimensions, where its truth is the sum of the singular values of the features' own cross-Gram matrix.
`sqrtm` is called as pytorch-fid, clean-fid and ADM's evaluator call it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from image_diffusion.core.process import command
from image_diffusion.metrics.distances.moments import Gaussian, Moments
from image_diffusion.metrics.distances.set_distances import frechet_distance


def by_sqrtm(first: Gaussian, second: Gaussian) -> float:
    """Return the distance by the published formula with a matrix root."""
    root = scipy.linalg.sqrtm((first.covariance @ second.covariance).numpy())
    difference = float((first.mean - second.mean).square().sum())
    return difference + float(first.covariance.trace() + second.covariance.trace()) - 2 * float(np.trace(root).real)


def full_rank(dimension: int) -> tuple[Gaussian, Gaussian, float]:
    """Return two Gaussians that do not commute, and their distance."""
    generator = torch.Generator().manual_seed(0)
    halves = (torch.randn(dimension, 2 * dimension, generator=generator, dtype=torch.float64) for _ in range(2))
    S1, T = (half @ half.T / half.shape[1] for half in halves)
    zero = torch.zeros(dimension, dtype=torch.float64)
    S2 = T @ S1 @ T
    return Gaussian(zero, S1), Gaussian(zero, (S2 + S2.T) / 2), float(S1.trace() + S2.trace() - 2 * (T @ S1).trace())


def few_samples(dimension: int) -> tuple[Gaussian, Gaussian, float]:
    """Return 500 and 700 samples, and the distance of their Gaussians."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, dimension, generator=generator, dtype=torch.float64) for n in (500, 700))

    def centred(features: Tensor) -> Tensor:
        return (features - features.mean(0)) / math.sqrt(len(features) - 1)

    first, second = Moments.from_features(x).gaussian, Moments.from_features(y).gaussian
    cross = float(torch.linalg.svdvals(centred(x) @ centred(y).T).sum())
    separate = (first.mean - second.mean).square().sum() + first.covariance.trace() + second.covariance.trace()
    return first, second, float(separate) - 2 * cross


def timed(distance: Callable[[Gaussian, Gaussian], float], first: Gaussian, second: Gaussian) -> tuple[float, float]:
    """Return CPU seconds of one call on new Gaussians, without cached values, and its result."""
    fresh = [Gaussian(each.mean, each.covariance) for each in (first, second)]
    start = time.process_time()
    result = distance(*fresh)
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", type=int, default=2048, help="of the features (2048)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, case in (("full rank", full_rank), ("500 and 700 samples", few_samples)):
        first, second, truth = case(arguments.dimension)
        rows: dict[str, list[tuple[float, float]]] = {"ours": [], "scipy.linalg.sqrtm": []}
        for _ in range(arguments.rounds):  # interleaved, so that a busy machine slows both
            rows["ours"].append(timed(frechet_distance, first, second))
            rows["scipy.linalg.sqrtm"].append(timed(by_sqrtm, first, second))
        ours = statistics.median(seconds for seconds, _ in rows["ours"])
        for method, found in rows.items():
            seconds = statistics.median(each for each, _ in found)
            error = abs(found[0][1] - truth) / truth
            print(
                f"{name:20} {method:20} {seconds:7.2f} CPU s  {seconds / ours:5.2f} x ours  relative error {error:.1e}"
            )


if __name__ == "__main__":
    command.run(main)
