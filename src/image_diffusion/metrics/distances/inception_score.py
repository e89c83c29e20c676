"""Inception Score (Salimans et al. 2016, section 4): exp of the mean KL of class probabilities to their mean.

The standard deviation over splits that torch-fidelity and torchmetrics report is neither an interval nor a bias
estimate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, bias_note, jackknife, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each


def inception_score(probabilities: Tensor, split_size: int | None = None) -> float:
    """Return the score of class probabilities [N, K], from 1 to K: the mean over consecutive splits of split_size (ADM:
    5000); unset: one split."""
    parts = probabilities.to(torch.float64).split(split_size or len(probabilities))
    scores = [_score(_information(part).sum(), part.sum(dim=0), len(part)) for part in parts]
    return sum(scores) / len(scores)


def inception_score_estimate(logits: Tensor, split_size: int = 5000) -> Estimate:
    """Return the score with its interval. logits: [N, K]."""
    probabilities = logits.to(torch.float64).softmax(dim=1)
    n, block = len(probabilities), block_of_each(len(probabilities))
    value = inception_score(probabilities, split_size)
    if few := too_few(n):
        return Estimate(value, n, note=few)
    sizes = torch.bincount(block, minlength=NUM_BLOCKS)
    information = torch.zeros(NUM_BLOCKS, dtype=torch.float64).index_add_(0, block, _information(probabilities))
    marginal = torch.zeros(NUM_BLOCKS, probabilities.shape[1], dtype=torch.float64).index_add_(0, block, probabilities)
    left_out = [
        _score(information.sum() - information[b], marginal.sum(dim=0) - marginal[b], n - int(sizes[b]))
        for b in range(NUM_BLOCKS)
    ]
    whole = _score(information.sum(), marginal.sum(dim=0), n)
    estimate = jackknife(whole, left_out, n, 1, probabilities.shape[1])
    assert estimate.debiased is not None and estimate.interval is not None
    return replace(estimate, value=value, note=bias_note(value, estimate.debiased, estimate.interval))


def _information(probabilities: Tensor) -> Tensor:
    """Return the sum of p log p of each row."""
    information: Tensor = torch.special.xlogy(probabilities, probabilities).sum(dim=1)
    return information


def _score(information: Tensor, summed: Tensor, count: int) -> float:
    marginal = summed / count
    return float(torch.exp(information / count - torch.special.xlogy(marginal, marginal).sum()))
