"""Selection of synthetic images: images drawn, images rejected with the reasons, and images of the set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.base import Detector, detect_each
from image_diffusion.metrics.images.memorization import LEAST_HELD_OUT, find_copies, reduced
from image_diffusion.metrics.samples import Samples
from image_diffusion.synthesis.config import RejectConfig, Request

Reasons = Mapping[str, NDArray[np.bool_]]
"""For each reason, whether it rejects each image, bool [N]. Several reasons may reject an image."""


@dataclass(frozen=True)
class Selection:
    """Images of a set among the images drawn. rows: int64 [K], their positions, in order. reasons: of all images drawn.
    num_requested: the requested number of images."""

    rows: NDArray[np.int64]
    reasons: Reasons
    num_requested: int

    def counts(self, samples: Samples, unlabelled: str) -> dict[str, dict[str, int]]:
        """Return by class how many images were drawn, rejected for each reason, rejected in all, kept, and not needed.
        samples: all images drawn. unlabelled: the name of the class of images without classes."""
        classes = samples.classes if samples.has_labels else [unlabelled]
        rejected = _any(self.reasons, samples.num_samples)
        kept = np.isin(np.arange(samples.num_samples), self.rows)
        masks = {"drawn": np.ones_like(rejected), **self.reasons, "rejected": rejected}
        masks |= {"kept": kept, "not_needed": ~rejected & ~kept}
        by_class = {name: np.bincount(samples.labels[mask], minlength=len(classes)) for name, mask in masks.items()}
        return {
            class_name: {name: int(counts[place]) for name, counts in by_class.items()}
            for place, class_name in enumerate(classes)
        }


class Chosen:
    """Some rows of images, read on demand; implements `metrics.samples.Rows`."""

    def __init__(self, samples: Samples, rows: NDArray[np.int64]) -> None:
        self._samples, self._rows = samples, rows
        channels, height, width = samples.shape
        self.shape = (len(rows), height, width, channels)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self._samples.gather(self._rows[rows]).permute(0, 2, 3, 1).numpy()


def select(samples: Samples, request: Request, reasons: Reasons) -> Selection:
    """Return the first images of each group that are not rejected, up to the requested number.

    Raises ValueError if every image is rejected.
    """
    groups, wanted = request.group_of_each(samples.num_samples), request.num_of_each
    passed = np.flatnonzero(~_any(reasons, samples.num_samples))
    if len(passed) == 0:
        counts = ", ".join(f"{int(mask.sum()):,} by {name}" for name, mask in reasons.items())
        raise ValueError(
            f"synthesize.reject rejects all {samples.num_samples:,} images that were drawn ({counts}). Lower "
            "reject.confidence, or train longer."
        )
    order = np.argsort(groups[passed], kind="stable")
    ordered = groups[passed][order]
    place = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)  # position of each image in its group
    rows = np.sort(passed[order[place < wanted[ordered]]])
    return Selection(rows, reasons, int(wanted.sum()))


def chosen(samples: Samples, selection: Selection) -> Samples:
    """Return the images of a set."""
    labels = samples.labels[selection.rows] if samples.has_labels else None
    digest = f"{samples.digest}, {len(selection.rows)} chosen"
    return Samples(Chosen(samples, selection.rows), labels, samples.classes, digest, samples.protocol)


def reasons_to_reject(samples: Samples, real: RealImages, detector: Detector, config: RejectConfig) -> Reasons:
    """Return which images are rejected, by each reason that is set.

    Raises ValueError for a reason that requires a detector or more images than the data set has.
    """
    reasons: dict[str, NDArray[np.bool_]] = {}
    detected, pixels = detect_each([detector, reduced], samples, "images to select")
    if config.needs_classes:
        if not detector.classes or not samples.has_labels or detected.logits is None:
            raise ValueError(
                "synthesize.reject.confidence and other_class need classes, but the images have none. Leave them out."
            )
        labels = torch.from_numpy(samples.labels)
        if config.other_class:
            reasons["other_class"] = (detected.logits.argmax(dim=1) != labels).numpy()
        if config.confidence:
            probability = detected.logits.double().softmax(dim=1)[torch.arange(len(labels)), labels]
            reasons["confidence"] = (probability < config.confidence).numpy()
    if config.near_training:
        copies = find_copies(pixels.features, real.train, real.validation)
        if copies.threshold is None:
            raise ValueError(
                f"synthesize.reject.near_training needs {LEAST_HELD_OUT} different images, held out or trained on, but "
                f"there are {copies.num_real}. Leave it out."
            )
        reasons["near_training"] = copies.flagged.numpy()
    return reasons


def _any(reasons: Reasons, count: int) -> NDArray[np.bool_]:
    rejected: NDArray[np.bool_] = np.any([np.zeros(count, np.bool_), *reasons.values()], axis=0)
    return rejected
