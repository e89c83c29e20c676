"""Metrics of classes: the recognised classes, the Inception Score (Salimans et al. 2016, section 4), the two-sample
test (Lopez-Paz and Oquab 2017), and real images in the label shares of samples.

The standard deviation over splits that torch-fidelity and torchmetrics report with an Inception Score is neither an
interval nor a bias estimate.

A distance between two mixtures of classes also measures the difference in their shares. Real images of two classes in
equal shares are far from real images of the same classes in shares of nine to one. If shares differ by more than
`LEAST_DIFFERENCE`, the reference's Gaussians are those of a mixture with the samples' shares, and metrics that need
single images use its largest subset with these shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.metrics.distances.jackknife import Estimate, bias_note, jackknife, share_estimate, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, Gaussian, Moments, block_of_each
from image_diffusion.metrics.distances.set_distances import SAMPLES_PER_DIMENSION, frechet_distance

_MISSING = 0.1
_MOST_TESTED = 5000
_MOST_NAMED = 100
"""Maximum number of classes that a plot names."""


def agreement(recognised: Tensor, labels: Tensor) -> Estimate:
    """Return the share of samples recognised as the requested class. Both arguments: int64 [N]."""
    return share_estimate(recognised == labels)


def missing_classes(recognised: Tensor, labels: Tensor, classes: list[str]) -> Estimate:
    """Count the classes recognised less than a tenth as often as requested. The note names them."""
    requested_counts = torch.bincount(labels, minlength=len(classes))
    recognised_counts = torch.bincount(recognised, minlength=len(classes))
    missing = [
        name
        for name, a, s in zip(classes, requested_counts.tolist(), recognised_counts.tolist(), strict=True)
        if s < _MISSING * a
    ]
    return Estimate(len(missing), len(labels), note=", ".join(missing))


def confusion(recognised: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the confusion matrix, int64 [K, K]: how often class i was requested and class j recognised."""
    return torch.bincount(labels * num_classes + recognised, minlength=num_classes**2).view(num_classes, num_classes)


def class_frechet(features: Tensor, labels: Tensor, reference: Tensor, reference_labels: Tensor) -> Estimate:
    """Return the mean over classes of the Fréchet distance within the class, over classes with two images on both
    sides.

    It is zero only if the images match their labels. Absent classes do not raise it: `missing_classes` counts them.
    """
    both = [int(c) for c in labels.unique() if (labels == c).sum() > 1 and (reference_labels == c).sum() > 1]
    if not both:
        return Estimate(0.0, len(labels), note="no class has two samples and two reference images")
    gaussians = {c: Moments.from_features(reference[reference_labels == c]).gaussian for c in both}
    value = _mean_distance(features, labels, gaussians)
    smallest = min(int((labels == c).sum()) for c in both)
    left_out = len(both) < len(labels.unique())
    note = f"over {len(both)} of {len(labels.unique())} classes" if left_out else ""
    if smallest < SAMPLES_PER_DIMENSION * features.shape[1] or too_few(len(labels)):
        few = f"biased: the smallest class has {smallest:,} samples, fewer than 5 a dimension"
        return Estimate(value, len(labels), note="; ".join(filter(None, (few, note))))
    block = block_of_each(len(labels))
    without = [_mean_distance(features[block != b], labels[block != b], gaussians) for b in range(NUM_BLOCKS)]
    return jackknife(value, without, len(labels), low=0.0)


def _mean_distance(features: Tensor, labels: Tensor, gaussians: dict[int, Gaussian]) -> float:
    distances = [
        frechet_distance(Moments.from_features(features[labels == c]).gaussian, real) for c, real in gaussians.items()
    ]
    return sum(distances) / len(distances)


def inception_score(probabilities: Tensor, split_size: int | None = None) -> float:
    """Return exp of the mean KL of class probabilities [N, K] to their mean, from 1 to K: the mean over consecutive
    splits of split_size (ADM: 5000); unset: one split."""
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

    count = min(len(features), len(reference), _MOST_TESTED)
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


LEAST_DIFFERENCE = 0.05
"""Threshold of the total variation between label shares, beyond the variation expected by chance, for reweighting a
reference. Our choice: nearly balanced sets such as ImageNet (0.013) are compared as in their protocols."""


def label_shares(labels: Tensor, num_classes: int) -> Tensor:
    """Return the share of each class, float64 [K]. labels: int64 [N], at least one."""
    return torch.bincount(labels, minlength=num_classes).double() / len(labels)


def difference(first: Tensor, second: Tensor) -> float:
    """Return the total variation between two label shares, float64 [K]: from 0 to 1."""
    return float((first - second).abs().sum() / 2)


def by_chance(shares: Tensor, count: int) -> float:
    """Return the approximate expected total variation between shares, float64 [K], and the shares of `count` labels
    drawn from them: mean deviations of binomials, in the normal limit."""
    return float((2 * shares * (1 - shares) / (torch.pi * count)).sqrt().sum() / 2)


def rows_in_shares(labels: Tensor, shares: Tensor) -> Tensor:
    """Return the rows of the largest subset with these label shares, int64, in order.

    Classes that the set lacks are left out; of each other class, the first images are used.

    labels: int64 [N]. shares: float64 [K].
    """
    counts = torch.bincount(labels, minlength=len(shares)).double()
    present = (counts > 0) & (shares > 0)
    if not bool(present.any()):
        return torch.empty(0, dtype=torch.int64)
    total = float((counts[present] / shares[present]).min())
    sizes = torch.where(present, total * shares + 1e-9, 0).long()
    rows = [(labels == label).nonzero().flatten()[:count] for label, count in enumerate(sizes.tolist()) if count]
    return torch.cat(rows).sort().values if rows else torch.empty(0, dtype=torch.int64)


def gaussian_in_shares(features: Tensor, labels: Tensor, shares: Tensor) -> Gaussian:
    """Return the Gaussian of a mixture of the classes with these shares, from all images of each class.

    features: [N, D]. labels: int64 [N]. shares: float64 [K]; classes that the set lacks are left out.
    """
    of_class = {
        int(label): Moments.from_features(features[labels == label])
        for label in labels.unique()
        if float(shares[int(label)]) > 0
    }
    total = sum(float(shares[label]) for label in of_class)
    weights = {label: float(shares[label]) / total for label in of_class}
    mean = torch.stack([weights[label] * moments.mean for label, moments in of_class.items()]).sum(dim=0)
    covariance = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for label, moments in of_class.items():
        apart = moments.mean - mean
        covariance += weights[label] * (moments.m2 / max(1, moments.count - 1) + torch.outer(apart, apart))
    return Gaussian(mean, covariance, sum(moments.count for moments in of_class.values()))


def plot_confusion(counts: Tensor, classes: Sequence[str], path: Path) -> None:
    """Plot the share of each requested class (rows) that was recognised as each class (columns). counts: int64 [K,
    K]."""
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    size = min(12.0, 3 + 0.3 * len(classes))
    figure = new_figure(size, size)
    axis = figure.subplots()
    shown = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    if len(classes) <= _MOST_NAMED:
        axis.set_xticks(range(len(classes)), classes, rotation=90)
        axis.set_yticks(range(len(classes)), classes)
    axis.set_xlabel("recognised")
    axis.set_ylabel("asked for")
    figure.colorbar(shown, ax=axis, shrink=0.8)
    save_figure(figure, path)
