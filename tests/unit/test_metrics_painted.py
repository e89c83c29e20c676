"""Painted digits, and the metrics of agreement between images and prompted attributes."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from image_diffusion.data.sources.scikit_digits import (
    DIGITS,
    INKS,
    Attributes,
    PaintedDigits,
    attributes_in,
    attributes_of,
    captions_of,
    measured,
    painted,
)
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.images.drawn_digits import _entry, evaluate_painted
from image_diffusion.metrics.samples import Samples

COUNT = 200


class Zero:
    """A detector that classifies everything as a zero."""

    identity: ClassVar[dict[str, Any]] = {}
    doubt: str | None = None

    def __init__(self) -> None:
        self.classes = list(DIGITS)

    def __call__(self, images: Tensor) -> Detected:
        return Detected(torch.zeros(len(images), 1), torch.eye(10)[:1].expand(len(images), -1))

    def metric_name(self, metric: str) -> str:
        return metric


def samples(prompts: list[str], shown: list[Attributes]) -> Samples:
    images = np.stack([painted(number, each) for number, each in enumerate(shown)])
    return Samples(images, None, [], protocol={"prompts": prompts})


def test_captions_name_the_attributes_of_their_images() -> None:
    source = PaintedDigits(num_images=COUNT)
    items, captions = source.listing().items, source.read_captions(())
    assert len(items) == COUNT and set(captions) == {item.name for item in items}
    for item in items:
        named = [attributes_in(caption) for caption in captions[item.name]]
        assert named[0] == attributes_of(int(item.address[0])) and item.label == DIGITS.index(named[0].digit or "")
        assert named[1].size is None and not named[0].is_held_out
        image = np.asarray(Image.open(io.BytesIO(source.read(item))))
        seen = measured(image)
        assert (seen.ink, seen.ground, seen.size) == (named[0].ink, named[0].ground, named[0].size)
    assert {attributes_of(number).ink for number in range(COUNT)} == set(INKS)


def test_each_attribute_is_evaluated_only_if_named() -> None:
    shown = [attributes_of(number) for number in range(COUNT)]
    prompts = [captions_of(each)[number % 2] for number, each in enumerate(shown)]
    found = evaluate_painted(samples(prompts, shown), [Zero()])
    zeros = sum(each.digit == "zero" for each in shown) / COUNT
    assert found["agreement_digit"]["value"] == found["agreement_digit"]["floor"] == pytest.approx(zeros)
    assert found["agreement_ink"]["value"] == found["agreement_ground"]["value"] == 1
    assert found["agreement_slant"]["value"] > 0.97
    assert _entry(np.repeat([1.0, 0.0], [99, 1]), np.ones(1))["interval"][1] == 1, "no share is above one"
    low, high = found["agreement_digit"]["interval"]
    assert 0 <= low < zeros < high
    assert (found["agreement_size"]["value"], found["agreement_size"]["n"]) == (1, COUNT // 2)
    assert found["agreement_ink"]["n"] == found["attributes_seen"]["n"] == COUNT
    assert 0 < found["agreement_ink"]["interval"][0] <= 1 == found["agreement_ink"]["interval"][1]
    assert "attributes_held_out" not in found, "no such prompt was asked"


def test_held_out_combinations_are_counted_separately() -> None:
    seen = [attributes_of(number) for number in range(100)]
    unseen = [Attributes("zero", "black", "white", "upright", "large")] * 100  # zeros are never black in training
    prompts = [captions_of(each)[0] for each in (*seen, *unseen)]
    found = evaluate_painted(samples(prompts, [*seen, *seen]), [Zero()])
    assert found["attributes_held_out"]["n"] == found["attributes_seen"]["n"] == 100
    assert found["attributes_held_out"]["value"] < found["attributes_seen"]["value"] < 1
    assert found["attributes_held_out"]["floor"] == pytest.approx(1, abs=0.01), "zeros painted as they were asked for"


def test_samples_without_prompts_or_digit_detector_are_rejected() -> None:
    shown = [attributes_of(0)]
    with pytest.raises(ValueError, match="the samples have no prompts"):
        evaluate_painted(samples([], shown), [Zero()])
    blind = Zero()
    blind.classes = []
    with pytest.raises(ValueError, match="no detector has the classes of digits"):
        evaluate_painted(samples(["a zero"], shown), [blind])
