"""Every metric of a set of samples, each with interval, note and its ratio to what real images score.

The floor: a metric between two sets of real images, at the same number of images. A ratio of 1 is as good as real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.metrics.classes import agreement, class_frechet, missing_classes
from image_diffusion.metrics.cmmd import cmmd
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.doubt import floor_doubt
from image_diffusion.metrics.features import Detected, Detector
from image_diffusion.metrics.frechet import frechet_estimate, frechet_infinity
from image_diffusion.metrics.intervals import Estimate
from image_diffusion.metrics.kernel import kernel_distance
from image_diffusion.metrics.moments import BlockMoments, Gaussian, Moments
from image_diffusion.metrics.neighbours import manifold_estimates
from image_diffusion.metrics.score import inception_score_estimate
from image_diffusion.metrics.sliced import monge_distance
from image_diffusion.metrics.two_sample import two_sample_test


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: Gaussians by metric, and where the images are at hand, what was seen in them.

    gaussians: "fd", perhaps "spatial_fd". labels: int64 [M], the images' classes; None without classes.
    """

    gaussians: Mapping[str, Gaussian]
    detected: Detected | None = None
    labels: Tensor | None = None

    @classmethod
    def of(cls, detected: Detected, labels: Tensor | None) -> Reference:
        """The reference that a set of real images is."""
        return cls(gaussians_of(detected), detected, labels)


def gaussians_of(detected: Detected) -> dict[str, Gaussian]:
    """The Gaussians of what was seen, by the metrics that compare them: "fd", perhaps "spatial_fd"."""
    found = {"fd": detected.features} | ({} if detected.spatial is None else {"spatial_fd": detected.spatial})
    return {name: Moments.of(features).gaussian for name, features in found.items()}


def measure(
    detected: Detected, labels: Tensor | None, reference: Reference, classes: list[str], settings: EvaluateConfig
) -> dict[str, Estimate]:
    """All metrics of one set, by their bare names: "fd", "kd", "precision", … .

    detected: of the samples. labels: int64 [N], what was asked for; None without classes. classes: what the detector's
    logits score, when that is the data set's own classes; else empty.
    """
    found: dict[str, Estimate] = {}
    for name, features in (("fd", detected.features), ("spatial_fd", detected.spatial)):
        if features is None or name not in reference.gaussians:
            continue
        moments = BlockMoments(features.shape[1], len(features))
        moments.update(features, torch.arange(len(features)))
        found[name] = frechet_estimate(moments.finish(), reference.gaussians[name])
        if settings.infinity and name == "fd":
            found["fd_infinity"] = frechet_infinity(moments.finish(), reference.gaussians[name])
    if detected.logits is not None and not classes:
        found["score"] = inception_score_estimate(detected.logits, settings.score_split)
    if reference.detected is not None:
        real = _some(reference.detected.features, settings.neighbour_references)
        made = _some(detected.features, settings.neighbour_references)
        found["kd"] = kernel_distance(made, real)
        found["mind"] = monge_distance(made, real)
        if settings.cmmd:
            found["cmmd"] = cmmd(made, real)
        found |= manifold_estimates(detected.features, real, settings.neighbours)
        if settings.two_sample:
            found["c2st"] = two_sample_test(detected.features, reference.detected.features)
    if classes and labels is not None and detected.logits is not None:
        recognised = detected.logits.argmax(dim=1)
        found["agreement"] = agreement(recognised, labels)
        found["missing_classes"] = missing_classes(recognised, labels, classes)
        if reference.detected is not None and reference.labels is not None:
            found["class_fd"] = class_frechet(detected.features, labels, reference.detected.features, reference.labels)
    return found


def with_floor(
    estimates: Mapping[str, Estimate], same_size: Mapping[str, Estimate], floor: Mapping[str, Estimate]
) -> dict[str, dict[str, Any]]:
    """Plain data of the estimates, each with `floor`, what real images score, and what compares with it.

    same_size: the estimates on as many samples as the floor was measured on, so that the two share their 1/N bias:
    `at_floor_n`. `ratio` is that over the floor; `doubt`: why the samples do not stand out from real images, or null.
    """
    entries = {}
    for name, estimate in estimates.items():
        entry = estimate.as_dict()
        if name in floor:
            entry["floor"], entry["floor_n"] = floor[name].value, floor[name].n
            entry["at_floor_n"] = same_size[name].value
            entry["doubt"] = floor_doubt(name, same_size[name], floor[name])
            if floor[name].value > 0:
                entry["ratio"] = same_size[name].value / floor[name].value
        entries[name] = entry
    return entries


def judged(entries: Mapping[str, dict[str, Any]], detector: Detector, suffix: str = "") -> dict[str, dict[str, Any]]:
    """The entries by their names on a detector, each with the doubt that there is about it."""
    doubt = {} if detector.doubt is None else {"doubt": detector.doubt}
    return {detector.metric_name(name) + suffix: entry | doubt for name, entry in entries.items()}


def _some(rows: Tensor, most: int) -> Tensor:
    """At most so many rows, drawn once and for all."""
    return rows if len(rows) <= most else rows[drawn(len(rows), most)]


def drawn(total: int, most: int) -> Tensor:
    """Int64: at most so many positions of so many, in order, drawn once and for all."""
    order = np.random.default_rng(0).permutation(total) if total > most else np.arange(total)
    return torch.from_numpy(np.sort(order[:most]))
