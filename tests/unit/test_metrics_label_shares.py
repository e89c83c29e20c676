"""Samples whose label shares differ from the data's are compared with real images of the same shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.class_metrics import (
    by_chance,
    difference,
    gaussian_in_shares,
    label_shares,
    rows_in_shares,
)
from image_diffusion.metrics.distances.moments import Moments
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.samples import Samples

CLASSES = ["dark", "bright"]


class Quarters:
    """A detector for tests: mean brightness of the quarters of an image, and which class that is."""

    classes = CLASSES
    identity: dict[str, Any] = {"name": "test", "sha256": "abc"}  # noqa: RUF012
    doubt: str | None = None

    def __call__(self, images: Tensor) -> Detected:
        quarters = torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1)
        level = quarters.mean(dim=1, keepdim=True)
        return Detected(quarters, -(level - torch.tensor([60.0, 180.0])).abs())

    def metric_name(self, metric: str) -> str:
        return f"inpipe_{metric}"


def images(dark: int, bright: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat([0, 1], [dark, bright]))
    pixels = np.clip(60 + 120 * labels[:, None, None, None] + rng.normal(0, 20, (dark + bright, 4, 4, 1)), 0, 255)
    return Samples(pixels.astype(np.uint8), labels, CLASSES, digest=f"set {seed}")


def judged(samples: Samples, data: RealImages) -> dict[str, Any]:
    return evaluate_samples(samples, data, [Quarters()], EvaluateConfig(copies=False))


def test_main_distance_does_not_measure_label_shares() -> None:
    data = RealImages(images(450, 50, 0), images(90, 10, 1))
    balanced, same = judged(images(200, 200, 2), data), judged(images(360, 40, 3), data)
    entry = balanced["metrics"]["inpipe_fd"]
    assert "40% of the labels differ from the data's, which alone is a distance of " in entry["note"]
    size = float(entry["note"].split("a distance of ")[1].split(";")[0])
    assert size > 1000 and max(same["metrics"]["inpipe_fd"]["value"], entry["value"]) < size / 100
    assert balanced["protocol"]["reference"]["label_shares"] == "of the samples"
    assert "label_shares" not in same["protocol"]["reference"] and "labels" not in same["metrics"]["inpipe_fd"]["note"]
    assert entry["floor"] < 100 and balanced["metrics"]["inpipe_precision"]["value"] > 0.7
    assert balanced["metrics"]["inpipe_kd"]["interval"][0] <= 0


def test_note_reports_label_shares_as_part_of_the_distance_for_small_classes() -> None:
    found = judged(images(100, 100, 2), RealImages(images(450, 1, 0), images(90, 10, 1)))
    assert "which is part of the distance: " in found["metrics"]["inpipe_fd"]["note"]
    assert found["protocol"]["reference"]["label_shares"] == "of the data"


def test_nearly_balanced_sets_are_compared_without_reweighting() -> None:
    found = judged(images(100, 100, 2), RealImages(images(210, 190, 0), images(50, 50, 1)))
    assert "label_shares" not in found["protocol"]["reference"]


def test_random_labels_differ_by_the_expected_chance_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.full((1000,), 1e-3, dtype=torch.float64)
    found = [label_shares(torch.randint(1000, (5000,), generator=generator), 1000) for _ in range(20)]
    assert difference(found[0], even) > 0.1
    assert by_chance(even, 5000) == pytest.approx(np.mean([difference(each, even) for each in found]), rel=0.05)


def test_largest_subset_has_the_requested_label_shares() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10 + [2] * 5)
    rows = rows_in_shares(labels, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    assert torch.bincount(labels[rows]).tolist() == [10, 10] and rows.diff().min() > 0
    assert len(rows_in_shares(labels, torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64))) == 0


def test_gaussian_in_own_label_shares_is_that_of_all_images() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) % 5 % 2
    features = torch.randn(3000, 3, generator=generator) + 5 * labels[:, None]
    found, plain = (
        gaussian_in_shares(features, labels, label_shares(labels, 2)),
        Moments.from_features(features).gaussian,
    )
    torch.testing.assert_close(found.mean, plain.mean)
    torch.testing.assert_close(found.covariance, plain.covariance, rtol=2e-3, atol=2e-3)
    assert found.mean == pytest.approx(plain.mean) and found.count == 3000


def test_each_preview_is_compared_with_its_own_label_shares() -> None:
    data = RealImages(images(450, 50, 0), images(90, 10, 1))
    previews = {100: images(180, 20, 4), 200: images(100, 100, 5)}

    def curve(samples: Samples) -> list[dict[str, Any]]:
        settings = EvaluateConfig(copies=False)
        curve: list[dict[str, Any]] = evaluate_samples(samples, data, [Quarters()], settings, previews=previews)[
            "curve"
        ]
        return curve

    found = [curve(images(*counts, 3)) for counts in ((360, 40), (200, 200), (400, 0))]
    assert found[0] == found[1] == found[2]
    assert all(point["inpipe_fd"] < 100 for point in found[0])
