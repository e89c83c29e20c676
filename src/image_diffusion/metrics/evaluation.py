"""Samples, a data set and a detector -> metrics.json and the pictures of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.config import dump
from image_diffusion.core.files import digest, sha256_file
from image_diffusion.metrics.classes import confusion
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.copies import find_copies
from image_diffusion.metrics.curve import measure_previews, plot_curve
from image_diffusion.metrics.features import Detected, Detector, ImageSet, detect
from image_diffusion.metrics.intervals import Estimate, mean_estimate
from image_diffusion.metrics.moments import Gaussian, block_of_each
from image_diffusion.metrics.panel import Reference, judged, measure, with_floor
from image_diffusion.metrics.plots import plot_classes, plot_confusion, plot_copies
from image_diffusion.metrics.references import is_statistics, read_statistics
from image_diffusion.metrics.samples import Samples, read_samples


@dataclass(frozen=True)
class RealImages:
    """A data set's two splits. train: what the model learned from. validation: what it never saw, perhaps nothing."""

    train: ImageSet
    validation: ImageSet

    def split(self, name: str) -> ImageSet:
        """The split of that name."""
        return self.train if name == "train" else self.validation


def evaluate_samples(
    samples: Samples,
    data: RealImages,
    detector: Detector,
    settings: EvaluateConfig,
    report: Path | None = None,
    reference_file: Path | None = None,
    previews: Mapping[int, Samples] | None = None,
) -> dict[str, Any]:
    """Judge samples. Returns {"metrics": {name: entry}, "doubt", "curve", "classes", "protocol"}, plain data.

    An entry: value, debiased, interval [low, high] or null, n, note, floor, floor_n, at_floor_n, ratio, doubt. report:
    a folder for the pictures. reference_file: statistics (ADM's or EDM's .npz) or other samples to compare with, in
    place of a split. previews: samples of earlier steps of the training, for the curve.

    Raises ValueError, before any long computation, for what cannot be measured.
    """
    _check(samples, data, settings, reference_file)
    classes = detector.classes if samples.has_labels else []
    labels = torch.from_numpy(samples.labels) if classes else None
    statistics = _statistics(reference_file, samples, detector) if reference_file else None
    made = detect(detector, samples, settings.batch_size, "features of samples")
    if reference_file and statistics is not None:
        reference, floor_images = Reference(statistics), None
        described: dict[str, Any] = {"file": reference_file.name, "sha256": sha256_file(reference_file)}
    else:
        reference, floor_images, described = _reference(data, detector, settings, reference_file, bool(classes))
    estimates = measure(made, labels, reference, classes, settings)
    same_size, floor = estimates, {}
    if floor_images is not None:
        real, real_labels = floor_images
        n = min(len(real), len(made))
        if n > settings.neighbours + 1:
            floor = measure(*_first(real, real_labels, n), reference, classes, settings)
            if n < len(made):
                same_size = measure(*_first(made, labels, n), reference, classes, settings)
    entries = judged(with_floor(estimates, same_size, floor), detector)
    if settings.copies:
        entries["copies"] = _copies(samples, data, report)
    curve = measure_previews(previews or {}, detector, reference, classes, settings)
    if report is not None and len(curve) > 1:
        plot_curve(curve, report / "curve.png")
    how: dict[str, Any] = {"detector": detector.identity, "reference": described, "settings": dump(settings)}
    protocol = {
        **how,
        "digest": digest(how),
        "num_samples": samples.num_samples,
        "samples_sha256": samples.digest,
        "samples": samples.protocol,
    }
    if report is not None:
        plot_classes(samples, report / "classes.png")
    by_class = _classes(made, labels, classes, report)
    return {"metrics": entries, "doubt": detector.doubt, "curve": curve, "classes": by_class, "protocol": protocol}


def _check(samples: Samples, data: RealImages, settings: EvaluateConfig, reference_file: Path | None) -> None:
    if samples.num_samples <= settings.neighbours + 1:
        raise ValueError(
            f"{samples.num_samples} samples are too few for evaluate.neighbours = {settings.neighbours}. "
            f"Generate at least {settings.neighbours + 2}."
        )
    if reference_file is None:
        real = data.split(settings.reference)
        if real.num_samples <= settings.neighbours + 1:
            raise ValueError(
                f"The {settings.reference} split has {real.num_samples} images, too few for evaluate.neighbours = "
                f"{settings.neighbours}. Set evaluate.reference to the other split, or data.validation_fraction higher."
            )
        if samples.shape != tuple(real.shape):
            raise ValueError(
                f"Samples have shape {list(samples.shape)} but the reference images {list(real.shape)} "
                "(channels, height, width). Compare images of one size."
            )
    if reference_file is not None and not is_statistics(reference_file):
        other = read_samples(reference_file).shape
        if samples.shape != other:
            raise ValueError(
                f"Samples have shape {list(samples.shape)} but those in {reference_file} {list(other)} "
                "(channels, height, width). Compare images of one size."
            )
    if samples.has_labels and data.train.classes and samples.labels.max() >= len(data.train.classes):
        raise ValueError(
            f"A sample has label {samples.labels.max()} but the data set has {len(data.train.classes)} classes. "
            "Evaluate against the data set the model was trained on."
        )


def _statistics(path: Path, samples: Samples, detector: Detector) -> dict[str, Gaussian] | None:
    """The statistics in a file, None when it holds images; checked against what the detector sees in one sample."""
    if not is_statistics(path):
        return None
    statistics = read_statistics(path, str(detector.identity["sha256"]))
    first = detect(detector, samples, 1, "first sample", limit=1)
    for name, seen in (("fd", first.features), ("spatial_fd", first.spatial)):
        if seen is not None and name in statistics and seen.shape[1] != statistics[name].dimension:
            raise ValueError(
                f"The detector's features have {seen.shape[1]} dimensions but the reference {path} has "
                f"{statistics[name].dimension}. Measure both with the same detector."
            )
    return statistics


def _reference(
    data: RealImages, detector: Detector, settings: EvaluateConfig, path: Path | None, by_class: bool
) -> tuple[Reference, tuple[Detected, Tensor | None] | None, dict[str, Any]]:
    """The reference, other real images for the floor (if there are any), and what the reference is."""
    if path is not None:
        others = read_samples(path, data.train.classes)
        seen = detect(detector, others, settings.batch_size, "features of the reference")
        labels = torch.from_numpy(others.labels) if by_class and others.has_labels else None
        described = {"file": path.name, "sha256": others.digest, "num_images": others.num_samples}
        return Reference.of(seen, labels), None, described
    other = "validation" if settings.reference == "train" else "train"
    sets = [data.split(name) for name in (settings.reference, other)]
    found = [_seen(each, detector, settings, by_class) if each.num_samples > 1 else None for each in sets]
    assert found[0] is not None
    described = {"split": settings.reference, "data": sets[0].digest, "num_images": sets[0].num_samples}
    return Reference.of(*found[0]), found[1], described


def _seen(
    images: ImageSet, detector: Detector, settings: EvaluateConfig, by_class: bool
) -> tuple[Detected, Tensor | None]:
    labels = torch.from_numpy(np.asarray(images.labels)) if by_class else None
    return detect(detector, images, settings.batch_size, "features of real images"), labels


def _first(detected: Detected, labels: Tensor | None, n: int) -> tuple[Detected, Tensor | None]:
    """n rows, drawn once and for all."""
    order: NDArray[np.int64] = np.random.default_rng(0).permutation(len(detected))[:n]
    chosen = torch.from_numpy(np.sort(order))
    return detected.take(chosen), None if labels is None else labels[chosen]


def _copies(samples: Samples, data: RealImages, report: Path | None) -> dict[str, Any]:
    """The share of samples nearer to a training image than 99 % of the held-out images are."""
    copies = find_copies(samples, data.train, data.validation)
    if report is not None:
        plot_copies(samples, data.train, copies, report / "nearest.png")
    if copies.threshold is None:
        note = "no threshold: it takes 100 held-out images"
        return Estimate(0, samples.num_samples, note=note).as_dict() | {"value": None}
    estimate = mean_estimate(copies.flagged.to(torch.float64), block_of_each(samples.num_samples), 0, 1)
    return estimate.as_dict() | {"floor": 0.01, "floor_n": data.validation.num_samples, "ratio": estimate.value / 0.01}


def _classes(made: Detected, labels: Tensor | None, classes: list[str], report: Path | None) -> dict[str, Any]:
    """For each class: how many samples were asked for, how many recognised, and the share of the first that agrees."""
    if labels is None or made.logits is None:
        return {}
    counts = confusion(made.logits.argmax(dim=1), labels, len(classes))
    if report is not None:
        plot_confusion(counts, classes, report / "confusion.png")
    asked, seen, right = counts.sum(dim=1).tolist(), counts.sum(dim=0).tolist(), counts.diagonal().tolist()
    return {
        name: {"asked": a, "recognised": s, "agreement": r / a if a else None}
        for name, a, s, r in zip(classes, asked, seen, right, strict=True)
    }
