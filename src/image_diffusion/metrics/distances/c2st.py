"""Classifier two-sample test (Lopez-Paz and Oquab 2017): how well can samples be distinguished from real images?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, share_estimate

_MOST = 5000


def two_sample_test(features: Tensor, reference: Tensor) -> Estimate:
    """Return the accuracy of a logistic regression on held-out features: 0.5 cannot distinguish, 1 always can.

    Both sides are cut to the size of the smaller one, at most 5000, and to an even number: halves with unequal shares
    of the two sides would push the accuracy below chance. Each half is classified by the model fitted to the other
    half, so the errors of the halves are dependent: the interval assumes as many independent answers as one half has.
    Raises ValueError for fewer than 4 samples on either side.
    """
    from sklearn.linear_model import LogisticRegression  # here, because it slows the start of a stage
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    count = min(len(features), len(reference), _MOST)
    if count < 4:
        raise ValueError(f"A two-sample test needs at least 4 samples on each side; got {count}.")
    count -= count % 2
    chosen_real = np.random.default_rng(1).permutation(len(reference))[:count]
    chosen_samples = np.random.default_rng(2).permutation(len(features))[:count]
    rows = np.concatenate([features[chosen_samples].numpy(), reference[chosen_real].numpy()]).astype(np.float64)
    is_real = np.arange(2 * count) >= count
    half = np.arange(2 * count) % 2 == 0
    right = np.empty(2 * count)
    for fitted, judged in ((half, ~half), (~half, half)):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
        model.fit(rows[fitted], is_real[fitted])
        right[judged] = model.predict(rows[judged]) == is_real[judged]
    return share_estimate(torch.from_numpy(right), independent=count)
