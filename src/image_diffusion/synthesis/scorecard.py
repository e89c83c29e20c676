"""Scores of a set of synthetic images: fidelity, diversity, utility and privacy, each with the score of real images.

Privacy is the information in the images about the training images of their model. Its distances are between images
reduced to 16 x 16 pixels (`metrics/images/memorization.py`), not between features of the data set's own detector: it
was trained on the same images, which by itself sets them apart from held-out images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.metrics.compute import fixed_subset
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, mean_estimate, share_estimate, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each
from image_diffusion.metrics.distances.precision_recall import neighbour_radii, squared_distances
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.base import Detector, ImageSet, detect
from image_diffusion.metrics.images.memorization import LEAST_HELD_OUT, mirrored, reduced_rows
from image_diffusion.metrics.samples import Samples
from image_diffusion.metrics.sanity_check import Part
from image_diffusion.synthesis.config import SCORES, RejectConfig, SynthesizeConfig, parse_requirement
from image_diffusion.synthesis.utility import (
    MOST_IMAGES,
    MULTIPLES,
    Classification,
    Labelled,
    Task,
    reduced_set,
    regression,
    utility,
)

_MOST = 10_000
"""Maximum number of images of each kind for distances."""
_MOST_COMPARED = 2000
"""Maximum number of images of each kind for the effective number."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of all images of each kind, float32 [N, columns, 2], as `NumberColumns.scaled` returns them. real: the
    real images that have numbers."""

    real: RealImages
    synthetic: Tensor
    train: Tensor
    held_out: Tensor


Scores = dict[str, dict[str, Any]]
"""Scores by name: {"value", "lower", "upper", "real", "n", "note", "verdict"}; None if not measured."""


def measure_set(
    synthetic: Samples,
    real: RealImages,
    detector: Detector,
    config: SynthesizeConfig,
    references: Sequence[Path] = (),
    pictures: Path | None = None,
    numbers: Numbers | None = None,
) -> Scores:
    """Return the scores of a set, all of `SCORES`.

    config: the classifiers of the utility. references: folders of the detector's features of the real images, if these
    are stored. pictures: a folder for pictures, which show training images too. numbers: those that the images were
    requested with, and those of the real images; the utility is then that of regressors. Raises ValueError for too few
    images.
    """
    settings = EvaluateConfig(two_sample=False)
    entries = evaluate_samples(synthetic, real, [detector], settings, pictures, references=references)["metrics"]
    measured = {name: _of_entry(entries[score.metric]) for name, score in SCORES.items() if score.metric in entries}
    measured |= _utility(synthetic, real, config, numbers) | measure_privacy(synthetic, real)
    measured["effective_number"] = _effective_number(synthetic, real, detector)
    scores = {name: measured.get(name, _missing("not measured for this set")) for name in SCORES}
    return scores if config.reject is None else _with_selection(scores, config.reject)


def _with_selection(scores: Scores, reject: RejectConfig) -> Scores:
    """Return the scores, with a note on scores whose measure also selected the images: these are too optimistic."""
    for name, selects in {"agreement": reject.needs_classes, "copies": reject.near_training}.items():
        if selects:
            _add_note(scores[name], "the images were selected by this measure (synthesize.reject)")
    return scores


def _effective_number(synthetic: Samples, real: RealImages, detector: Detector) -> dict[str, Any]:
    """Return the score of the effective number, in the detector's features, with that of held-out images."""

    def features(images: ImageSet, title: str) -> Tensor:
        rows = fixed_subset(images.num_samples, _MOST_COMPARED).numpy()
        return detect(detector, Part(images, rows), f"{title} to compare").features

    sigma = bandwidth(features(real.train, "training images"))
    has_held_out = real.validation.num_samples > 1
    others = effective_number(features(real.validation, "held-out images"), sigma).value if has_held_out else None
    return score_of(effective_number(features(synthetic, "synthetic images"), sigma), others)


def bandwidth(features: Tensor) -> float:
    """Return the median distance of the training images to the nearest other one, at which k falls to exp(-1/2).
    features: float32 [N, D]; NaN for fewer than two."""
    if len(features) < 2:
        return math.nan
    return float(neighbour_radii(features, 1).cpu().sqrt().median())


def effective_number(features: Tensor, sigma: float) -> Estimate:
    """Return 1 / mean k(x_i, x_j)² over the pairs i ≠ j, with k(x, y) = exp(-|x - y|² / (2 sigma²)): the number of
    different images that a set is equivalent to.

    Order two of the Vendi score (Pasarkar and Dieng 2023, "Cousins of the Vendi score"), which is the Rényi kernel
    entropy score of Jalali et al. (2023, "An information-theoretic evaluation of generative models in learning
    multi-modal distributions"). Unlike the score of order one, which grows with the number of images, its denominator
    has an unbiased estimate, so that sets of different sizes are comparable (Ospanov and Farnia 2024, "Do Vendi scores
    converge with finite samples?").

    A set of m equally frequent images that have nothing in common has m; identical images have 1. features: float32 [N,
    D]. sigma: the bandwidth, in units of the features; the interval assumes it is exact. NaN if all pairs together are
    less similar than one pair of equal images, which means only that the number is large.
    """
    n = len(features)
    if n < 2 or not sigma > 0:
        return Estimate(math.nan, n, note="not measured: it takes two images, and training images that differ")
    block = block_of_each(n)
    sums = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, dtype=torch.float64)  # of k², by the blocks of both images
    for rows, squared in squared_distances(features, features):
        similar = torch.exp(-squared.cpu() / sigma**2)
        places = torch.arange(n)[rows]
        similar[torch.arange(len(places)), places] = 0  # without pairs of an image with itself
        of_rows = torch.zeros(len(places), NUM_BLOCKS, dtype=torch.float64).index_add_(1, block, similar)
        sums.index_add_(0, block[places], of_rows)
    total = float(sums.sum())
    if total < 1:
        return Estimate(math.nan, n, note="not measured: no two images are alike")
    value = n * (n - 1) / total
    if few := too_few(n):
        return Estimate(value, n, note=few)
    left = n - torch.bincount(block, minlength=NUM_BLOCKS)
    without = sums.sum() - sums.sum(dim=0) - sums.sum(dim=1) + sums.diagonal()
    # The interval is that of the mean of k², which is unbiased and symmetric, not that of its inverse.
    mean = jackknife(total / n / (n - 1), (without / left / (left - 1)).tolist(), n, 0, 1)
    assert mean.interval is not None
    low, high = mean.interval
    if low == 0:
        return Estimate(value, n, note="no interval: too few images are alike")
    return Estimate(value, n, value, (1 / high, 1 / low))


def faults(scores: Scores, requirement: str) -> list[str]:
    """Return a sentence for each condition of a requirement that is not met; empty if the set may be released."""
    conditions = parse_requirement(requirement)
    return [f"{row.text}: {violation}" for row in conditions if (violation := row.violation(scores)) is not None]


def numbers_of(scores: Scores) -> dict[str, float]:
    """Return the measured scores as flat numbers: `copies`, `copies.lower`, `copies.upper`."""
    named = {
        name if field == "value" else f"{name}.{field}": score[field]
        for name, score in scores.items()
        for field in ("value", "lower", "upper")
    }
    return {name: number for name, number in named.items() if number is not None}


def _of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a score from an entry of metrics.json, whose floor is the value of held-out images."""
    note = "; ".join(filter(None, (entry["note"], entry.get("doubt"))))
    value = entry["value"] if entry["debiased"] is None else entry["debiased"]
    return _score(value, entry["interval"], entry["floor"], entry["n"], note)


def score_of(estimate: Estimate, real: float | None) -> dict[str, Any]:
    """Return a score from an estimate. real: the value of real images; None without one."""
    if math.isnan(estimate.value):
        return _missing(estimate.note)
    real = None if real is None or math.isnan(real) else real
    return _score(estimate.value, estimate.interval, real, estimate.n, estimate.note)


def _missing(note: str) -> dict[str, Any]:
    return _score(None, None, None, 0, note)


def _score(
    value: float | None, interval: Sequence[float] | None, real: float | None, n: int, note: str
) -> dict[str, Any]:
    low, high = interval or (None, None)
    return {"value": value, "lower": low, "upper": high, "real": real, "n": n, "note": note}


def _utility(synthetic: Samples, real: RealImages, config: SynthesizeConfig, numbers: Numbers | None) -> Scores:
    """Return the scores of utility, and the verdict on each gain; the value of real images is the accuracy with
    them."""
    names = [name for name, score in SCORES.items() if score.group == "Utility"]
    real = real if numbers is None else numbers.real
    num_classes = len(real.train.classes) if synthetic.has_labels else 0
    if num_classes < 2 and numbers is None:
        return {name: _missing("not measured: it takes two classes, or numbers") for name in names}
    if real.validation.num_samples == 0:
        return {name: _missing("not measured: no images are held out") for name in names}
    held_out = reduced_set(real.validation, numbers=numbers.held_out if numbers else None)
    task: Task = Classification(num_classes)
    if numbers is not None:
        try:
            task, held_out = regression(held_out)
        except ValueError as error:
            return {name: _missing(f"not measured: {error}") for name in names}
    estimates = utility(
        _with_numbers(reduced_set(real.train, numbers=numbers.train if numbers else None)),
        _with_numbers(reduced_set(synthetic, MULTIPLES[-1] * MOST_IMAGES, numbers.synthetic if numbers else None)),
        held_out,
        task,
        config.classifier_seeds,
        config.classifier_steps,
        num_classes if num_classes > 1 else 0,
    )
    alone = estimates["real"].value
    scores = {}
    for name, estimate in estimates.items():
        is_gain = name.startswith("gain")
        score = score_of(estimate, None if is_gain else alone)
        if numbers is not None:
            _add_note(score, "of regressors of the numbers: the share of the held-out variance that they explain")
        if is_gain:
            score["verdict"] = verdict(estimate)
        scores[f"utility.{name}"] = score
    return scores


def _add_note(score: dict[str, Any], note: str) -> None:
    score["note"] = "; ".join(filter(None, (score["note"], note)))


def _with_numbers(images: Labelled) -> Labelled:
    """Return the images with a known number, if the task is to recognise numbers; otherwise all images."""
    if images.numbers is None:
        return images
    return images.take(images.numbers[..., 1].bool().any(dim=1).nonzero().squeeze(1))


def verdict(gain: Estimate) -> str | None:
    """Return "better", "worse" or "within noise" for a gain; None without an interval."""
    if gain.interval is None:
        return None
    low, high = gain.interval
    return "better" if low > 0 else "worse" if high < 0 else "within noise"


def measure_privacy(synthetic: Samples, real: RealImages) -> Scores:
    """Return the scores that are measured on pixels. The scores of real images use the same measures, with held-out
    images in place of the synthetic set: for membership half of them, tested with the other half; for `nearest_ratio`
    all of them."""
    held_out = _pixels(real.validation)
    if len(held_out) < 4 or real.train.num_samples < 4:
        few = _missing("not measured: it takes four held-out images")
        return dict.fromkeys(("nearest_ratio", "membership.auc", "membership.true_positives"), few)
    train, samples = _pixels(real.train), _pixels(synthetic)
    near = [_nearest(images, samples) for images in (train, held_out)]
    as_set, others = held_out[::2], held_out[1::2]
    baseline = [_nearest(images, as_set) for images in (train, others)]
    return {
        "nearest_ratio": score_of(nearest_ratio(samples, train), nearest_ratio(held_out, train).value),
        "membership.auc": score_of(membership_auc(*near), membership_auc(*baseline).value),
        "membership.true_positives": score_of(true_positives(*near), true_positives(*baseline).value),
    }


def _nearest(images: Tensor, synthetic: Tensor) -> Tensor:
    """Return the distance of each image, or of its mirror image, to the nearest synthetic image, float64 [N]: models
    may be trained on both."""
    return torch.minimum(*(nearest_distances(view, synthetic)[:, 0] for view in (images, mirrored(images))))


def _pixels(images: ImageSet) -> Tensor:
    """Return a fixed random subset of images, reduced to 16 pixels: float32 [N, C * 16 * 16]."""
    rows = fixed_subset(images.num_samples, _MOST).numpy()
    return reduced_rows(images, rows) if len(rows) else torch.empty(0, 0)


FALSE_POSITIVES = 0.01
"""False-positive rate at which `true_positives` is measured."""
_LEAST = 20


def nearest_distances(queries: Tensor, images: Tensor, k: int = 1) -> Tensor:
    """Return the distances of queries [N, D] to their k nearest images of [M, D], float64 [N, k], the nearest first."""
    rows = [squared.topk(k, largest=False).values.sqrt().cpu() for _, squared in squared_distances(queries, images)]
    return torch.cat(rows)


def membership_auc(members: Tensor, others: Tensor) -> Estimate:
    """Return the area under the ROC curve of membership inference by the distance to the nearest synthetic image.

    It is the probability that a training image is nearer to the synthetic set than an image outside the training set;
    0.5: the set does not distinguish them (the attack of Chen et al. 2020, "GAN-Leaks", on generated samples alone).
    members, others: distances [N] and [M]. The interval is DeLong's (DeLong et al. 1988), over members and others of
    the same distributions, for a fixed synthetic set.
    """
    n, m = len(members), len(others)
    if min(n, m) < _LEAST:
        value = _placements(members, others).mean().item() if min(n, m) else math.nan
        return Estimate(value, n, note=f"no interval: {min(n, m)} images are fewer than {_LEAST}")
    of_members, of_others = _placements(members, others), 1 - _placements(others, members)
    value = float(of_members.mean())
    reach = 1.96 * math.sqrt(float(of_members.var() / n + of_others.var() / m))
    return Estimate(value, n, value, (max(0.0, value - reach), min(1.0, value + reach)))


def _placements(near: Tensor, far: Tensor) -> Tensor:
    """Return for each distance of `near` the share of larger distances in `far`; ties count half. Float64 [N]."""
    ordered = far.to(torch.float64).sort().values
    below, up_to = (torch.searchsorted(ordered, near.to(torch.float64), right=right) for right in (False, True))
    return 1 - (below + up_to).to(torch.float64) / 2 / len(far)


def true_positives(members: Tensor, others: Tensor) -> Estimate:
    """Return the share of members that are recognised at the threshold where 1 % of the others are mistaken for members
    (Carlini et al. 2022, "Membership inference attacks from first principles", section III).

    members, others: distances to the nearest synthetic image, [N] and [M]. Others at a distance of 0 are left out: they
    are trained on, too. The interval is Wilson's, for a fixed threshold.
    """
    others = others[others > 0]
    if len(others) < LEAST_HELD_OUT:
        return Estimate(math.nan, len(members), note=f"not measured: it takes {LEAST_HELD_OUT} held-out images")
    return share_estimate(members < others.quantile(FALSE_POSITIVES))


def nearest_ratio(samples: Tensor, train: Tensor) -> Estimate:
    """Return the mean ratio of the distances to the nearest and the second nearest training image: near 0 for copies of
    single images. samples, train: [N, D] and [M, D]."""
    first, second = nearest_distances(samples, train, 2).unbind(dim=1)
    ratio = torch.where(second > 0, first / second, torch.zeros_like(first))
    return mean_estimate(ratio, 0, 1)
