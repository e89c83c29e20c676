"""Metrics of a set of samples, each with an interval, a note and its ratio to the score of real images.

The floor: a metric between two sets of real images, at the same number of images. A ratio of 1 is as good as real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.class_metrics import (
    agreement,
    class_frechet,
    inception_score_estimate,
    missing_classes,
    two_sample_test,
)
from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.metrics.distances.moments import Gaussian, Moments, block_moments
from image_diffusion.metrics.distances.precision_recall import ball_radii, manifold_estimates
from image_diffusion.metrics.distances.set_distances import (
    cmmd,
    frechet_estimate,
    frechet_infinity,
    kernel_distance,
    monge_distance,
    own_pairs,
)
from image_diffusion.metrics.features.base import Detected, Detector

T = TypeVar("T")
DISTANCES = ("fd", "fd_infinity", "spatial_fd", "kd", "mind", "cmmd", "class_fd")
"""Metrics of the distance between samples and real images, in which samples cannot be better than real images."""


@dataclass(frozen=True)
class Reference:
    """Reference of a comparison: Gaussians by metric and, if the images are available, their features.

    gaussians: see `gaussians_of`. labels: int64 [M], the images' classes; None without classes.
    """

    gaussians: Mapping[str, Gaussian]
    detected: Detected | None = None
    labels: Tensor | None = None
    _computed: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_images(cls, detected: Detected, labels: Tensor | None) -> Reference:
        """Return the reference of a set of real images."""
        return cls(gaussians_of(detected), detected, labels)

    def computed_once(self, compute: Callable[..., T], most: int, *settings: Any) -> T:
        """Return `compute(features, *settings)` for the features of at most `most` images, computed once and cached."""
        assert self.detected is not None
        key = (compute, most, *settings)
        if key not in self._computed:
            self._computed[key] = compute(_subset(self.detected.features, most), *settings)
        return cast("T", self._computed[key])


def gaussians_of(detected: Detected) -> dict[str, Gaussian]:
    """Return the Gaussians of a detector's features, by the metric that compares them: "fd", optionally
    "spatial_fd"."""
    return {name: Moments.from_features(rows).gaussian for name, rows in detected.compared.items()}


def measure(
    detected: Detected, labels: Tensor | None, reference: Reference, classes: list[str], settings: EvaluateConfig
) -> dict[str, Estimate]:
    """Return all metrics of one set of samples, by name without a detector: "fd", "kd", "precision", … .

    detected: features of the samples. labels: int64 [N], the requested classes; None without classes. classes: names of
    the detector's logits if they are the data set's own classes, else empty.
    """
    estimates: dict[str, Estimate] = {}
    for name, features in detected.compared.items():
        if name not in reference.gaussians:
            continue
        blocks = block_moments(features)
        estimates[name] = frechet_estimate(blocks, reference.gaussians[name])
        if settings.infinity and name == "fd":
            estimates["fd_infinity"] = frechet_infinity(blocks, reference.gaussians[name])
    if detected.logits is not None and not classes:
        estimates["score"] = inception_score_estimate(detected.logits, settings.score_split)
    if reference.detected is not None:
        most, k = settings.neighbour_references, settings.neighbours
        real, samples = (_subset(rows.features, most) for rows in (reference.detected, detected))
        estimates["kd"] = kernel_distance(samples, real, reference_pairs=reference.computed_once(own_pairs, most))
        estimates["mind"] = monge_distance(samples, real)
        if settings.cmmd:
            estimates["cmmd"] = cmmd(samples, real)
        radii = reference.computed_once(ball_radii, most, k)
        estimates |= manifold_estimates(detected.features, real, k, radii)
        if settings.two_sample:
            estimates["c2st"] = two_sample_test(detected.features, reference.detected.features)
    if classes and labels is not None and detected.logits is not None:
        recognised = detected.logits.argmax(dim=1)
        estimates["agreement"] = agreement(recognised, labels)
        estimates["missing_classes"] = missing_classes(recognised, labels, classes)
        if reference.detected is not None and reference.labels is not None:
            estimates["class_fd"] = class_frechet(
                detected.features, labels, reference.detected.features, reference.labels
            )
    return estimates


def measure_preview(
    detected: Detected, labels: Tensor | None, reference: Reference, most_references: int
) -> dict[str, Estimate]:
    """Return the metrics of `measure` that the curve of a training shows: "kd", "fd", "agreement".

    labels: int64 [N], the requested classes; None if the detector has other classes. most_references: maximum number of
    images on each side of the kernel distance, which is unbiased even for few images.
    """
    estimates: dict[str, Estimate] = {}
    if reference.detected is not None:
        real, samples = (_subset(rows.features, most_references) for rows in (reference.detected, detected))
        pairs = reference.computed_once(own_pairs, most_references)
        estimates["kd"] = kernel_distance(samples, real, reference_pairs=pairs)
    estimates["fd"] = frechet_estimate(block_moments(detected.features), reference.gaussians["fd"])
    if labels is not None and detected.logits is not None:
        estimates["agreement"] = agreement(detected.logits.argmax(dim=1), labels)
    return estimates


def with_floor(
    estimates: Mapping[str, Estimate], same_size: Mapping[str, Estimate], floor: Mapping[str, Estimate]
) -> dict[str, dict[str, Any]]:
    """Return the estimates as plain data, each with `floor`, the score of real images, and its comparison with the
    floor.

    same_size: the estimates on as many samples as the floor has, with the same 1/N bias: `at_floor_n`. `ratio` is
    `at_floor_n` over the floor; `doubt`: why the samples cannot be distinguished from real images, or null.
    """
    entries = {name: estimate.as_dict() for name, estimate in estimates.items()}
    for name in entries.keys() & floor.keys():
        entry, value, real = entries[name], same_size[name].value, floor[name]
        entry |= {"floor": real.value, "floor_n": real.n, "at_floor_n": value}
        entry["doubt"] = floor_doubt(name, same_size[name], real)
        if real.value > 0:
            entry["ratio"] = value / real.value
    return entries


def floor_doubt(name: str, same_size: Estimate, floor: Estimate) -> str | None:
    """Return the reason why a distance does not distinguish samples from real images; None if it does, or for other
    metrics.

    same_size, floor: estimates on equal numbers of samples and real images. If both have debiased values, these are
    used.
    """
    if name not in DISTANCES:
        return None
    debiased = same_size.debiased is not None and floor.debiased is not None
    sampled, real = (estimate.debiased if debiased else estimate.value for estimate in (same_size, floor))
    highest = floor.interval[1] if floor.interval is not None else real
    if sampled is None or highest is None or sampled > highest:
        return None
    between = f" [{floor.interval[0]:.4g}, {floor.interval[1]:.4g}]" if floor.interval is not None else ""
    return (
        f"{floor.n:,} real images score {real:.4g}{between}, as many samples {sampled:.4g}: "
        "this many do not tell the samples from real images"
    )


def named_by_detector(
    entries: Mapping[str, dict[str, Any]], detector: Detector, suffix: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the entries by their names with a detector, each with the doubt about that detector."""
    doubt = {} if detector.doubt is None else {"doubt": detector.doubt}
    return {detector.metric_name(name) + suffix: entry | doubt for name, entry in entries.items()}


def doubts_of(detectors: Sequence[Detector]) -> dict[str, Any]:
    """Return the doubts about the detectors for metrics.json: of the first, which gives the headline, and of all."""
    return {
        "doubt": detectors[0].doubt,
        "doubts": [detector.doubt for detector in detectors if detector.doubt is not None],
    }


def _subset(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` rows, a fixed random subset."""
    return rows if len(rows) <= most else rows[fixed_subset(len(rows), most)]


def fixed_subset(total: int, most: int) -> Tensor:
    """Return at most `most` of `total` positions, a fixed random subset: int64, sorted."""
    order = np.random.default_rng(0).permutation(total) if total > most else np.arange(total)
    return torch.from_numpy(np.sort(order[:most]))
