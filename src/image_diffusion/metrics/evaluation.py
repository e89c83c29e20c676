"""Samples, a data set and a detector -> metrics.json and the pictures of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from image_diffusion.metrics.copies import LEAST_HELD_OUT, Copies, copies_seen, find_copies, reduced
from image_diffusion.metrics.curve import measure_previews, plot_curve
from image_diffusion.metrics.doubt import doubts_of
from image_diffusion.metrics.features import Detected, Detector, ImageSet, detect, detect_each
from image_diffusion.metrics.intervals import Estimate, share_estimate
from image_diffusion.metrics.moments import Gaussian
from image_diffusion.metrics.panel import Reference, drawn, gaussians_of, judged, measure, with_floor
from image_diffusion.metrics.plots import plot_classes, plot_confusion, plot_copies
from image_diffusion.metrics.references import is_statistics, read_statistics
from image_diffusion.metrics.samples import Samples, read_samples
from image_diffusion.metrics.seen import Seen, read_seen
from image_diffusion.metrics.self_test import Part, degraded_half, halves, look_and_test, self_test


@dataclass(frozen=True)
class RealImages:
    """A data set's two splits. train: what the model learned from. validation: what it never saw, perhaps nothing."""

    train: ImageSet
    validation: ImageSet

    def split(self, name: str) -> ImageSet:
        """The split of that name."""
        return self.train if name == "train" else self.validation

    @property
    def looked_at(self) -> dict[str, ImageSet]:
        """What detectors look at, by name: both splits, and degraded training images for their self-test."""
        return {"train": self.train, "validation": self.validation, "degraded": degraded_half(self.train)}


class NoImages:
    """A split of a data set of which there are no images, only classes."""

    def __init__(self, classes: list[str]) -> None:
        self.num_samples, self.classes = 0, classes
        self.shape: tuple[int, ...] = (0, 0, 0)
        self.labels = np.empty(0, np.int64)

    @property
    def digest(self) -> str:
        """Of nothing."""
        return ""

    def gather(self, indices: np.ndarray) -> Tensor:
        """None of them, uint8 [0, 0, 0, 0]."""
        assert len(indices) == 0
        return torch.empty((0, *self.shape), dtype=torch.uint8)


@dataclass(frozen=True)
class _Against:
    """What one detector's view of samples is compared with. floor: other real images and their classes, if any."""

    reference: Reference
    floor: tuple[Detected, Tensor | None] | None = None


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
    """Judge samples. Returns {"metrics": {name: entry}, "doubt", "doubts", "curve", "classes", "protocol"}, plain data.

    An entry: value, debiased, interval [low, high] or null, n, note, floor, floor_n, at_floor_n, ratio, doubt. "doubt":
    of the first detector, which gives the headline; "doubts": of all. report: a folder for the pictures.
    reference_file: statistics (ADM's or EDM's .npz) or other samples to compare with, in place of a split. previews:
    samples of earlier steps of the training, for the curve. references: the folders of what detectors have seen in the
    data before (`write_seen`); for a detector without one, the images are looked at here.

    Raises ValueError, before any long computation, for what cannot be measured.
    """
    _check(samples, data, settings, reference_file)
    known = read_seen(references, detectors, data.looked_at)
    looked: Sequence[Mapping[str, Seen]] = []  # what detectors see in the splits, where they look at any
    statistics = [_statistics(reference_file, samples, each) if reference_file else None for each in detectors]
    made = detect_each([*detectors, reduced], samples, "features of samples")
    small = made.pop().features
    if reference_file is not None and is_statistics(reference_file):
        against = [_Against(Reference(each)) for each in statistics if each is not None]
        described: dict[str, Any] = {"file": reference_file.name, "sha256": sha256_file(reference_file)}
        tested = look_and_test(detectors, data.train)
    elif reference_file is not None:
        against, described = _other_samples(reference_file, samples, data, detectors, settings)
        tested = look_and_test(detectors, data.train)
    else:
        looked = _views(data, detectors, settings, known)
        against, described = _real(samples, data, detectors, settings, looked)
        tested = self_test(detectors, *_halves(data, looked))
    entries: dict[str, dict[str, Any]] = {}
    points: dict[int, dict[str, Any]] = {}
    for detector, seen, other in zip(detectors, made, against, strict=True):
        entries |= _panel(detector, seen, samples, other, settings)
        for point in measure_previews(previews or {}, detector, other.reference, _classes(detector, samples), settings):
            points.setdefault(point["step"], {}).update(point)
    if settings.copies:
        entries["copies"] = _copies(find_copies(small, data.train, data.validation), samples, data, report)
        for detector, seen, real in zip(detectors, made, looked if data.train.num_samples > 1 else [], strict=False):
            entries |= judged({"copies": _copies_seen(detector, seen, real, samples, data, settings, report)}, detector)
    curve = list(points.values())
    if report is not None and len(curve) > 1:
        plot_curve(curve, report / "curve.png")
    identities = [each.identity for each in detectors]
    how: dict[str, Any] = {"detectors": identities, "reference": described, "settings": _told(settings)}
    protocol = {
        **how,
        "digest": digest(how),
        "num_samples": samples.num_samples,
        "samples_sha256": samples.digest,
        "samples": samples.protocol,
    }
    if report is not None:
        plot_classes(samples, report / "classes.png")
    by_class = [_by_class(each, seen, samples, report) for each, seen in zip(detectors, made, strict=True)]
    return {
        "metrics": entries,
        **doubts_of(detectors),
        "self_test": tested,
        "curve": curve,
        "classes": next(filter(None, by_class), {}),
        "protocol": protocol,
    }


def _told(settings: EvaluateConfig) -> dict[str, Any]:
    """The settings that numbers depend on."""
    return {key: value for key, value in dump(settings).items() if key != "published"}


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
    first = detect(detector, samples, "first sample", limit=1)
    for name, seen in (("fd", first.features), ("spatial_fd", first.spatial)):
        if seen is not None and name in statistics and seen.shape[1] != statistics[name].dimension:
            raise ValueError(
                f"The detector's features have {seen.shape[1]} dimensions but the reference {path} has "
                f"{statistics[name].dimension}. Measure both with the same detector."
            )
    return statistics


def _views(
    data: RealImages,
    detectors: Sequence[Detector],
    settings: EvaluateConfig,
    known: Sequence[Mapping[str, Seen] | None],
) -> list[Mapping[str, Seen]]:
    """What each detector sees in the real images: what it has seen before, or what it sees now."""
    asked = [detector for detector, seen in zip(detectors, known, strict=True) if seen is None]
    now: list[dict[str, Seen]] = [{} for _ in asked]
    for name, images in data.looked_at.items() if asked else ():
        if images.num_samples > 1:
            seen_now = detect_each(asked, images, f"features of real images, {name}")
            for views, each in zip(now, seen_now, strict=True):
                views[name] = Seen(each, gaussians_of(each) if name == settings.reference else {})
    looked = iter(now)
    return [next(looked) if seen is None else seen for seen in known]


def _halves(
    data: RealImages, views: Sequence[Mapping[str, Seen]]
) -> tuple[list[tuple[Detected, Detected]], list[Detected]]:
    """What `self_test` compares, of what was seen: of each detector the two halves, and the second one degraded."""
    first, second = map(torch.from_numpy, halves(data.train.num_samples))
    if len(first) == 0:
        return [], []
    trained = [each["train"].detected for each in views]
    return [(each.take(first), each.take(second)) for each in trained], [each["degraded"].detected for each in views]


def _real(
    samples: Samples,
    data: RealImages,
    detectors: Sequence[Detector],
    settings: EvaluateConfig,
    views: Sequence[Mapping[str, Seen]],
) -> tuple[list[_Against], dict[str, Any]]:
    """The split that samples are compared with, the other one for the floor, and what the first is."""
    names = (settings.reference, "validation" if settings.reference == "train" else "train")
    against = []
    for detector, seen in zip(detectors, views, strict=True):
        by_class = bool(_classes(detector, samples))
        labels = {name: torch.from_numpy(np.asarray(data.split(name).labels)) if by_class else None for name in names}
        floor = (seen[names[1]].detected, labels[names[1]]) if names[1] in seen else None
        real = seen[names[0]]
        against.append(_Against(Reference(real.gaussians, real.detected, labels[names[0]]), floor))
    images = data.split(names[0])
    return against, {"split": names[0], "data": images.digest, "num_images": images.num_samples}


def _other_samples(
    path: Path, samples: Samples, data: RealImages, detectors: Sequence[Detector], settings: EvaluateConfig
) -> tuple[list[_Against], dict[str, Any]]:
    """Other samples as what is compared with, and what they are."""
    others = read_samples(path, data.train.classes)
    against = []
    seen = detect_each(detectors, others, "features of the reference")
    for detector, rows in zip(detectors, seen, strict=True):
        has_classes = bool(_classes(detector, samples)) and others.has_labels
        labels = torch.from_numpy(others.labels) if has_classes else None
        against.append(_Against(Reference(gaussians_of(rows), rows, labels)))
    return against, {"file": path.name, "sha256": others.digest, "num_images": others.num_samples}


def _panel(
    detector: Detector, made: Detected, samples: Samples, against: _Against, settings: EvaluateConfig
) -> dict[str, dict[str, Any]]:
    """The entries of one detector."""
    classes = _classes(detector, samples)
    labels = torch.from_numpy(samples.labels) if classes else None
    estimates = measure(made, labels, against.reference, classes, settings)
    same_size, floor = estimates, {}
    if against.floor is not None:
        real, real_labels = against.floor
        n = min(len(real), len(made))
        if n > settings.neighbours + 1:
            floor = measure(*_first(real, real_labels, n), against.reference, classes, settings)
            if n < len(made):
                same_size = measure(*_first(made, labels, n), against.reference, classes, settings)
    return judged(with_floor(estimates, same_size, floor), detector)


def _classes(detector: Detector, samples: Samples) -> list[str]:
    """The classes that samples were asked for with, where a detector knows them."""
    return detector.classes if samples.has_labels else []


def _first(detected: Detected, labels: Tensor | None, n: int) -> tuple[Detected, Tensor | None]:
    """n rows, drawn once and for all."""
    order: NDArray[np.int64] = np.random.default_rng(0).permutation(len(detected))[:n]
    chosen = torch.from_numpy(np.sort(order))
    return detected.take(chosen), None if labels is None else labels[chosen]


def _copies_seen(
    detector: Detector,
    made: Detected,
    real: Mapping[str, Seen],
    samples: Samples,
    data: RealImages,
    settings: EvaluateConfig,
    report: Path | None,
) -> dict[str, Any]:
    """The same as a detector sees them, of at most `neighbour_references` samples and held-out images."""
    chosen = drawn(len(made), settings.neighbour_references)
    held_out = real["validation"].detected.features if "validation" in real else None
    if held_out is not None:
        held_out = held_out[drawn(len(held_out), settings.neighbour_references)]
    copies = copies_seen(made.features[chosen], real["train"].detected.features, held_out)
    name = f"nearest-{detector.metric_name('copies')}.png"
    return _copies(copies, Part(samples, chosen.numpy()), data, report, name)


def _copies(
    copies: Copies, samples: ImageSet, data: RealImages, report: Path | None, name: str = "nearest.png"
) -> dict[str, Any]:
    """The share of samples nearer to a training image than 99 % of the held-out images are."""
    if report is not None:
        plot_copies(samples, data.train, copies, report / name)
    if copies.threshold is None:
        note = f"no threshold: it takes {LEAST_HELD_OUT} held-out images"
        return Estimate(0, samples.num_samples, note=note).as_dict() | {"value": None}
    estimate = share_estimate(copies.flagged)
    return estimate.as_dict() | {"floor": 0.01, "floor_n": data.validation.num_samples, "ratio": estimate.value / 0.01}


def _by_class(detector: Detector, made: Detected, samples: Samples, report: Path | None) -> dict[str, Any]:
    """For each class: how many samples were asked for, how many recognised, and the share of the first that agrees."""
    classes = _classes(detector, samples)
    if not classes or made.logits is None:
        return {}
    counts = confusion(made.logits.argmax(dim=1), torch.from_numpy(samples.labels), len(classes))
    if report is not None:
        plot_confusion(counts, classes, report / "confusion.png")
    asked, seen, right = counts.sum(dim=1).tolist(), counts.sum(dim=0).tolist(), counts.diagonal().tolist()
    return {
        name: {"asked": a, "recognised": s, "agreement": r / a if a else None}
        for name, a, s, r in zip(classes, asked, seen, right, strict=True)
    }
