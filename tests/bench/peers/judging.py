"""One library's Fréchet distance of the same features: what `make peers` runs, each in a process of its own.

    python tests/bench/peers/judging.py clean-fid

Prints one line of JSON: CPU seconds of the distance between 4,000 and 3,000 samples of 2,048 features, and its relative
error. The true distance is known to rounding, from a closed form: both sets are centred and mixed so
that their covariances are S and T S T with a diagonal T, for which tr (S1 S2)^½ = tr(T S).
Inception itself is left out: all libraries run the same network.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

DIMENSION, COUNTS = 2048, (4000, 3000)
"""Of features as Inception gives; samples of the two sets."""

Distance = Callable[[np.ndarray, np.ndarray], float]


def features() -> tuple[np.ndarray, np.ndarray, float]:
    """Two sets of features in float64, and the Fréchet distance of their Gaussians."""
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((DIMENSION, DIMENSION)) / np.sqrt(DIMENSION)
    scale = generator.uniform(0.8, 1.25, DIMENSION)
    sets = []
    for count in COUNTS:
        drawn = generator.standard_normal((count, DIMENSION))
        drawn -= drawn.mean(0)
        whitened = np.linalg.qr(drawn)[0] * np.sqrt(count - 1)
        sets.append(whitened @ mixing)
    first, second = sets[0], sets[1] * scale + 0.1
    S = np.cov(first, rowvar=False)
    # S2 = T S T, so S1^½ S2 S1^½ = (S1^½ T S1^½)², whose root has the trace of T S.
    distance = DIMENSION * 0.1**2 + np.trace(S) + np.trace(S * np.outer(scale, scale)) - 2 * np.sum(scale * np.diag(S))
    return first, second, float(distance)


def ours() -> Distance:
    from image_diffusion.metrics.distances.moments import Moments
    from image_diffusion.metrics.distances.set_distances import frechet_distance

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        one, other = (Moments.from_features(torch.from_numpy(each)).gaussian for each in (first, second))
        return frechet_distance(one, other)

    return distance


def clean_fid() -> Distance:
    from cleanfid.fid import fid_from_feats

    return lambda first, second: float(fid_from_feats(first, second))


def torch_fidelity() -> Distance:
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        one, other = (fid_features_to_statistics(torch.from_numpy(each)) for each in (first, second))
        return float(next(iter(fid_statistics_to_metric(one, other, verbose=False).values())))

    return distance


def torchmetrics() -> Distance:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Identity(torch.nn.Module):
        num_features = DIMENSION

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        metric = FrechetInceptionDistance(feature=Identity(), normalize=True, input_img_size=(DIMENSION,))
        metric.used_custom_model, metric.inception = True, Identity()
        for is_real, rows in ((True, first), (False, second)):
            for part in torch.from_numpy(rows).split(500):
                metric.update(part, real=is_real)
        return float(metric.compute())

    return distance


JUDGES = {"ours": ours, "clean-fid": clean_fid, "torch-fidelity": torch_fidelity, "torchmetrics": torchmetrics}


def main() -> None:
    torch.set_num_threads(1)
    distance = JUDGES[sys.argv[1]]()
    first, second, truth = features()
    started = time.process_time()
    found = distance(first, second)
    spent_s = time.process_time() - started
    print(json.dumps({"cpu_s": spent_s, "error": abs(found - truth) / truth}))


if __name__ == "__main__":
    main()
