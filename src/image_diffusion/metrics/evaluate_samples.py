"""Samples, a data set and a detector -> metrics.json and the pictures of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest, sha256_file
from image_diffusion.core.levels import Levels
from image_diffusion.metrics.compute import (
    Reference,
    doubts_of,
    fixed_subset,
    gaussians_of,
    measure,
    named_by_detector,
    with_floor,
)
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.curves import measure_previews, plot_curve
from image_diffusion.metrics.distances.class_metrics import (
    LEAST_DIFFERENCE,
    by_chance,
    confusion,
    difference,
    gaussian_in_shares,
    label_shares,
    plot_confusion,
    rows_in_shares,
)
from image_diffusion.metrics.distances.jackknife import Estimate, share_estimate
from image_diffusion.metrics.distances.set_distances import frechet_distance
from image_diffusion.metrics.features.base import Detected, Detector, ImageSet, detect, detect_each
from image_diffusion.metrics.features.reference_features import (
    ReferenceFeatures,
    is_statistics,
    read_features,
    read_statistics,
)
from image_diffusion.metrics.images.memorization import (
    LEAST_HELD_OUT,
    Copies,
    find_copies,
    find_feature_copies,
    plot_copies,
    reduced,
)
from image_diffusion.metrics.samples import Samples, plot_classes, read_samples
from image_diffusion.metrics.sanity_check import Part, degraded_half, halves, run_self_test, self_test


@dataclass(frozen=True)
class RealImages:
    """The two splits of a data set. train: the training images. validation: held-out images, which may be empty.
    levels: value levels of arrays, which the splits return scaled for detectors; None for pictures."""

    train: ImageSet
    validation: ImageSet
    levels: Levels | None = None

    def split(self, name: str) -> ImageSet:
        """Return a split by name."""
        return self.train if name == "train" else self.validation

    @property
    def image_sets(self) -> dict[str, ImageSet]:
        """Return the image sets for the detectors, by name: both splits, and degraded training images for the
        self-test."""
        return {"train": self.train, "validation": self.validation, "degraded": degraded_half(self.train)}


@dataclass(frozen=True)
class Comparison:
    """Samples and their reference on one detector.

    samples: their features. labels: their requested classes, int64 [N]; None if the detector has other classes.
    baseline: other real images and their classes, if any, whose score is the floor. splits: features of the data's
    splits, by name; empty if the reference is a file. note: for the Fréchet distance, if label shares differ; else
    empty.
    """

    detector: Detector
    samples: Detected
    labels: Tensor | None
    reference: Reference
    baseline: tuple[Detected, Tensor | None] | None = None
    splits: Mapping[str, ReferenceFeatures] = field(default_factory=dict)
    note: str = ""

    @property
    def classes(self) -> list[str]:
        """Return the requested classes of the samples, if the detector has these classes."""
        return [] if self.labels is None else self.detector.classes


def evaluate_samples(
    samples: Samples,
    data: RealImages,
    detectors: Sequence[Detector],
    settings: EvaluateConfig,
    report: Path | None = None,
    reference_file: Path | None = None,
    previews: Mapping[int, Samples] | None = None,
    references: Sequence[Path] = (),
) -> dict[str, Any]:
    """Evaluate samples. Returns {"metrics": {name: entry}, "doubt", "doubts", "self_test", "curve", "classes",
    "protocol"}, plain data.

    An entry: value, debiased, interval [low, high] or null, n, note, floor, floor_n, at_floor_n, ratio, doubt. "doubt":
    of the first detector, which gives the headline; "doubts": of all detectors. report: a folder for the pictures.
    reference_file: statistics (ADM's or EDM's .npz) or other samples to compare with, instead of a split. previews:
    samples of earlier steps of the training, for the curve. references: the folders of features that `write_features`
    stored; a detector without one computes its features of the real images here.

    Raises ValueError, before any long computation, for inputs that cannot be measured.
    """
    name, k = settings.reference, settings.neighbours
    _check_samples(samples, data, k)
    stored = read_features(references, detectors, data.image_sets)
    if reference_file is None:
        _check_split(samples, data, name, k)
        compare = partial(_compare_with_split, name=name, neighbours=k, stored=stored)
    else:
        _check_file(reference_file, samples, detectors, data.levels)
        compare = partial(_compare_with_file, path=reference_file)
    *features, pixels = detect_each([*detectors, reduced], samples, "features of samples")
    comparisons, reference, tested = compare(features, samples, data, detectors)
    entries: dict[str, dict[str, Any]] = {}
    points: dict[int, dict[str, Any]] = {}
    for comparison in comparisons:
        entries |= _entries_of(comparison, settings)
        reference_for = partial(_reference_for, comparison=comparison, data=data, name=name, neighbours=k)
        for point in measure_previews(previews or {}, comparison.detector, reference_for, comparison.classes, settings):
            points.setdefault(point["step"], {}).update(point)
    if settings.copies:
        entries["copies"] = _copies(find_copies(pixels.features, data.train, data.validation), samples, data, report)
        for comparison in comparisons:
            if "train" in comparison.splits:
                entries |= _copies_in_features(comparison, samples, data, settings.neighbour_references, report)
    curve = list(points.values())
    if report is not None and len(curve) > 1:
        plot_curve(curve, report / "curve.png")
    identities = [detector.identity for detector in detectors]
    how = {"detectors": identities, "reference": reference, "settings": _protocol_settings(settings)}
    described = {"num_samples": samples.num_samples, "samples_sha256": samples.digest, "samples": samples.protocol}
    if report is not None and samples.has_labels and samples.classes:
        plot_classes(samples, report / "classes.png")
    elif report is not None:
        (report / "classes.png").unlink(missing_ok=True)
    by_class = [_by_class(comparison, report) for comparison in comparisons]
    return {
        "metrics": entries,
        **doubts_of(detectors),
        "self_test": tested,
        "curve": curve,
        "classes": next(filter(None, by_class), {}),
        "protocol": {**how, "digest": digest(how), **described},
    }


def _protocol_settings(settings: EvaluateConfig) -> dict[str, Any]:
    """Return the settings that the metrics depend on."""
    return {key: value for key, value in dump(settings).items() if key != "published"}


def _check_samples(samples: Samples, data: RealImages, neighbours: int) -> None:
    if samples.num_samples <= neighbours + 1:
        raise ValueError(
            f"{samples.num_samples} samples are too few for evaluate.neighbours = {neighbours}. "
            f"Generate at least {neighbours + 2}."
        )
    if samples.has_labels and data.train.classes and samples.labels.max() >= len(data.train.classes):
        raise ValueError(
            f"A sample has label {samples.labels.max()} but the data set has {len(data.train.classes)} classes. "
            "Evaluate against the data set the model was trained on."
        )


def _check_split(samples: Samples, data: RealImages, name: str, neighbours: int) -> None:
    real = data.split(name)
    if real.num_samples <= neighbours + 1:
        raise ValueError(
            f"The {name} split has {real.num_samples} images, too few for evaluate.neighbours = "
            f"{neighbours}. Set evaluate.reference to the other split, or data.validation_fraction higher."
        )
    _check_shape(samples, tuple(real.shape), "the reference images")


def _check_file(path: Path, samples: Samples, detectors: Sequence[Detector], levels: Levels | None) -> None:
    if not is_statistics(path):
        _check_shape(samples, read_samples(path, levels=levels).shape, f"those in {path}")
        return
    for detector in detectors:
        statistics = read_statistics(path, str(detector.identity["sha256"]))
        for name, features in detect(detector, samples, "first sample", limit=1).compared.items():
            if name in statistics and features.shape[1] != statistics[name].dimension:
                raise ValueError(
                    f"The detector's features have {features.shape[1]} dimensions but the reference {path} has "
                    f"{statistics[name].dimension}. Measure both with the same detector."
                )


def _check_shape(samples: Samples, shape: tuple[int, ...], reference: str) -> None:
    if samples.shape != shape:
        raise ValueError(
            f"Samples have shape {list(samples.shape)} but {reference} {list(shape)} (channels, height, width). "
            "Compare images of one size."
        )


def _compare_with_split(
    features: Sequence[Detected],
    samples: Samples,
    data: RealImages,
    detectors: Sequence[Detector],
    name: str,
    neighbours: int,
    stored: Sequence[Mapping[str, ReferenceFeatures] | None],
) -> tuple[list[Comparison], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return comparisons with the named split, with the other split as the baseline; the description of the reference;
    and the self-test of the detectors."""
    other = "validation" if name == "train" else "train"
    images = data.split(name)
    shares = _differing_shares(samples, images)
    labels = {split: _labels_of(data.split(split)) for split in (name, other)}
    comparisons = []
    real = _split_features(data, detectors, name, stored)
    for detector, detected, splits in zip(detectors, features, real, strict=True):
        requested = _requested_classes(detector, samples)
        class_labels = labels if requested is not None else dict.fromkeys(labels)
        reference = Reference(splits[name].gaussians, splits[name].detected, class_labels[name])
        baseline = (splits[other].detected, class_labels[other]) if other in splits else None
        comparison = Comparison(detector, detected, requested, reference, baseline, splits)
        if shares is not None:
            comparison = _in_shares(comparison, labels[name], labels[other], shares, neighbours)
        comparisons.append(comparison)
    described: dict[str, Any] = {"split": name, "data": images.digest, "num_images": images.num_samples}
    if shares is not None:
        composed = all(c.reference.detected is not c.splits[name].detected for c in comparisons)
        described["label_shares"] = "of the samples" if composed else "of the data"
    first, second = map(torch.from_numpy, halves(data.train.num_samples))
    tested = self_test(
        (
            c.detector,
            c.splits["train"].detected.take(first),
            c.splits["train"].detected.take(second),
            c.splits["degraded"].detected,
        )
        for c in comparisons
        if len(first)
    )
    return comparisons, described, tested


def _split_features(
    data: RealImages,
    detectors: Sequence[Detector],
    reference: str,
    stored: Sequence[Mapping[str, ReferenceFeatures] | None],
) -> list[dict[str, ReferenceFeatures]]:
    """Return each detector's features of the real images: the stored ones, or else newly computed ones."""
    features = [dict(splits or {}) for splits in stored]
    missing = [number for number, splits in enumerate(stored) if splits is None]
    for name, images in data.image_sets.items() if missing else ():
        if images.num_samples > 1:
            computed = detect_each([detectors[i] for i in missing], images, f"features of real images, {name}")
            for number, detected in zip(missing, computed, strict=True):
                gaussians = gaussians_of(detected) if name == reference else {}
                features[number][name] = ReferenceFeatures(detected, gaussians)
    return features


def _differing_shares(samples: Samples, images: ImageSet) -> Tensor | None:
    """Return the label shares of samples, float64 [K], if they differ from those of images by more than
    `LEAST_DIFFERENCE` beyond chance; else None."""
    if not samples.has_labels or len(images.classes) < 2:
        return None
    shares, real = (label_shares(_labels_of(some), len(images.classes)) for some in (samples, images))
    least = LEAST_DIFFERENCE + by_chance(real, samples.num_samples)
    return shares if difference(shares, real) > least else None


def _labels_of(images: ImageSet) -> Tensor:
    return torch.from_numpy(np.asarray(images.labels))


def _in_shares(
    comparison: Comparison, labels: Tensor, baseline_labels: Tensor, shares: Tensor, neighbours: int
) -> Comparison:
    """Return the comparison with real images in the label shares of the samples; if too few images can have these
    shares, the comparison with the unchanged reference and a note.

    labels, baseline_labels: labels of the reference and of the baseline, int64. shares: label shares of the samples,
    float64 [K].
    """
    reference, detected = comparison.reference, comparison.reference.detected
    assert detected is not None
    gaussians = {name: gaussian_in_shares(rows, labels, shares) for name, rows in detected.compared.items()}
    size = frechet_distance(gaussians["fd"], reference.gaussians["fd"])
    apart = f"{difference(shares, label_shares(labels, len(shares))):.0%} of the labels differ from the data's"
    # Gaussians can mix all images of the classes; metrics of single images need a subset with these shares
    rows = rows_in_shares(labels, shares)
    if len(rows) <= neighbours + 1:
        part = f"{size:.4g} between real images of these shares and of the data's"
        return replace(comparison, note=f"{apart}, which is part of the distance: {part}")
    note = f"reference weighted by the samples' labels: {apart}, which alone is a distance of {size:.4g}"
    baseline = comparison.baseline and _take(*comparison.baseline, rows_in_shares(baseline_labels, shares))
    reference = Reference(gaussians, *_take(detected, reference.labels, rows))
    return replace(comparison, reference=reference, baseline=baseline, note=note)


def _reference_for(preview: Samples, comparison: Comparison, data: RealImages, name: str, neighbours: int) -> Reference:
    """Return the reference in the label shares of a preview, which may differ from those of the samples."""
    if not comparison.splits:
        return comparison.reference
    images, stored = data.split(name), comparison.splits[name]
    labels = _labels_of(images)
    reference = Reference(stored.gaussians, stored.detected, None if comparison.labels is None else labels)
    shares = _differing_shares(preview, images)
    if shares is None:
        return reference
    comparison = replace(comparison, reference=reference, baseline=None)
    return _in_shares(comparison, labels, labels, shares, neighbours).reference


def _compare_with_file(
    features: Sequence[Detected],
    samples: Samples,
    data: RealImages,
    detectors: Sequence[Detector],
    path: Path,
) -> tuple[list[Comparison], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return comparisons with the statistics or the samples in a file, and what `_compare_with_split` returns."""
    requested = [_requested_classes(detector, samples) for detector in detectors]
    if is_statistics(path):
        described: dict[str, Any] = {"file": path.name, "sha256": sha256_file(path)}
        references = [Reference(read_statistics(path, str(detector.identity["sha256"]))) for detector in detectors]
    else:
        others = read_samples(path, data.train.classes, data.levels)
        described = {"file": path.name, "sha256": others.digest, "num_images": others.num_samples}
        class_labels = [
            torch.from_numpy(others.labels) if labels is not None and others.has_labels else None
            for labels in requested
        ]
        detected = detect_each(detectors, others, "features of the reference")
        references = list(map(Reference.from_images, detected, class_labels))
    comparisons = list(map(Comparison, detectors, features, requested, references))
    return comparisons, described, run_self_test(detectors, data.train)


def _requested_classes(detector: Detector, samples: Samples) -> Tensor | None:
    """Return the requested classes of the samples, int64 [N], if the detector has these classes."""
    return torch.from_numpy(samples.labels) if detector.classes and samples.has_labels else None


def _entries_of(comparison: Comparison, settings: EvaluateConfig) -> dict[str, dict[str, Any]]:
    """Return the entries of one detector."""
    samples, labels = comparison.samples, comparison.labels
    estimates = measure(samples, labels, comparison.reference, comparison.classes, settings)
    same_size, floor = estimates, {}
    if comparison.baseline is not None:
        real, real_labels = comparison.baseline
        # the floor and `same_size` use equal numbers of images, so that they have the same bias of order 1/N
        n = min(len(real), len(samples))
        if n > settings.neighbours + 1:
            first = _take(real, real_labels, fixed_subset(len(real), n))
            floor = measure(*first, comparison.reference, comparison.classes, settings)
            if n < len(samples):
                first = _take(samples, labels, fixed_subset(len(samples), n))
                same_size = measure(*first, comparison.reference, comparison.classes, settings)
    entries = with_floor(estimates, same_size, floor)
    entries["fd"]["note"] = "; ".join(filter(None, (comparison.note, entries["fd"]["note"])))
    return named_by_detector(entries, comparison.detector)


def _take(detected: Detected, labels: Tensor | None, rows: Tensor) -> tuple[Detected, Tensor | None]:
    """Return the chosen rows of features, and of labels if there are any."""
    return detected.take(rows), None if labels is None else labels[rows]


def _copies_in_features(
    comparison: Comparison, samples: Samples, data: RealImages, most: int, report: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the entry of the copies in a detector's features, for at most `most` samples and held-out images."""
    detector, splits = comparison.detector, comparison.splits
    rows = fixed_subset(samples.num_samples, most)
    held_out = splits["validation"].detected.features if "validation" in splits else None
    if held_out is not None:
        held_out = held_out[fixed_subset(len(held_out), most)]
    copies = find_feature_copies(comparison.samples.features[rows], splits["train"].detected.features, held_out)
    name = f"nearest-{detector.metric_name('copies')}.png"
    entry = _copies(copies, Part(samples, rows.numpy()), data, report, name, "held-out")
    return named_by_detector({"copies": entry}, detector)


def _copies(
    copies: Copies,
    samples: ImageSet,
    data: RealImages,
    report: Path | None,
    name: str = "nearest.png",
    real: str = "held-out or training",
) -> dict[str, Any]:
    """Return the share of samples nearer to a training image than 99 % of real images are. real: the images that may
    set the threshold, for the note."""
    if report is not None:
        plot_copies(samples, data.train, copies, report / name)
    if copies.threshold is None:
        note = f"no threshold: it takes {LEAST_HELD_OUT} {real} images"
        return Estimate(0, samples.num_samples, note=note).as_dict() | {"value": None}
    estimate = share_estimate(copies.flagged)
    if data.validation.num_samples < LEAST_HELD_OUT:
        estimate = replace(estimate, note=f"threshold: {copies.num_real:,} training images, each against the others")
    return estimate.as_dict() | {"floor": 0.01, "floor_n": copies.num_real, "ratio": estimate.value / 0.01}


def _by_class(comparison: Comparison, report: Path | None) -> dict[str, Any]:
    """Return for each class the numbers of samples requested and recognised, and the share of the requested ones that
    agree."""
    classes, labels, logits = comparison.classes, comparison.labels, comparison.samples.logits
    if labels is None or logits is None:
        return {}
    counts = confusion(logits.argmax(dim=1), labels, len(classes))
    if report is not None:
        plot_confusion(counts, classes, report / "confusion.png")
    sums = (counts.sum(dim=1).tolist(), counts.sum(dim=0).tolist(), counts.diagonal().tolist())
    return {
        name: {"asked": requested, "recognised": recognised, "agreement": right / requested if requested else None}
        for name, requested, recognised, right in zip(classes, *sums, strict=True)
    }
