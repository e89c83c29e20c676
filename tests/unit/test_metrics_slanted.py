"""Slanted digits, and the errors between measured and requested numbers."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.sources.scikit_digits import (
    HELD_OUT,
    RANGES,
    SlantedDigits,
    drawn,
    is_held_out,
    measured_numbers,
    numbers_of,
)
from image_diffusion.metrics.images.drawn_digits import evaluate_drawn
from image_diffusion.metrics.samples import Samples

COUNT = 200


def samples(asked: list[dict[str, float]], shown: list[dict[str, float]]) -> Samples:
    images = np.stack([drawn(number, **numbers)[:, :, None] for number, numbers in enumerate(shown)])
    values = {name: [numbers.get(name) for numbers in asked] for name in RANGES}
    return Samples(images, None, [], protocol={"conditions": {"values": values}})


def test_stored_numbers_match_the_drawn_digits() -> None:
    source = SlantedDigits(num_images=COUNT)
    items, beside = source.listing().items, source.read_values(("slant", "size"))
    assert len(items) == COUNT and set(beside) == {item.name for item in items}
    errors = []
    for item in items:
        image = np.asarray(Image.open(io.BytesIO(source.read(item))))
        assert image.shape == (32, 32) and item.label == int(item.name[0])
        measured, numbers = measured_numbers(image), beside[item.name]
        assert numbers == numbers_of(int(item.address[0])) and not is_held_out(numbers["slant"])
        errors.append([abs(measured[name] - numbers[name]) / (high - low) for name, (low, high) in RANGES.items()])
    assert (np.mean(errors, axis=0) < 0.05).all()
    slants = sorted(numbers["slant"] for numbers in beside.values())
    assert RANGES["slant"][0] <= slants[0] < HELD_OUT[0] and HELD_OUT[1] < slants[-1] <= RANGES["slant"][1]
    with pytest.raises(ValueError, match="no column 'age'. Known: slant, size"):
        source.read_values(("age",))


def test_error_is_the_distance_to_the_requested_number() -> None:
    shown = [numbers_of(number) for number in range(COUNT)]
    right = evaluate_drawn(samples(shown, shown), [])
    assert right["error_slant"]["value"] == pytest.approx(right["error_slant"]["floor"])
    assert right["error_size"]["value"] == right["error_size"]["floor"] < 0.05
    assert right["error_size"]["n"] == right["error_size_seen"]["n"] == COUNT and "error_size_held_out" not in right
    low, high = right["error_size"]["interval"]
    assert 0 <= low < right["error_size"]["value"] < high

    asked = [numbers | {"slant": 0.2} for numbers in shown[: COUNT // 2]] + shown[COUNT // 2 :]
    wrong = evaluate_drawn(samples(asked, shown), [])
    assert wrong["error_slant_held_out"]["n"] == COUNT // 2
    off = np.mean([abs(numbers["slant"] - 0.2) for numbers in shown[: COUNT // 2]])
    assert wrong["error_slant_held_out"]["value"] == pytest.approx(off, abs=0.02)
    assert wrong["error_slant_held_out"]["floor"] < 0.02 and wrong["error_slant_seen"]["value"] < 0.02


def test_missing_numbers_are_skipped_and_samples_without_numbers_rejected() -> None:
    shown = [numbers_of(number) for number in range(20)]
    asked = [{"slant": numbers["slant"]} if number % 2 else numbers for number, numbers in enumerate(shown)]
    found = evaluate_drawn(samples(asked, shown), [])
    assert (found["error_slant"]["n"], found["error_size"]["n"]) == (20, 10)
    with pytest.raises(ValueError, match="the samples were not made of slant and size. Judge those of a model with"):
        evaluate_drawn(Samples(np.zeros((3, 32, 32, 1), np.uint8), None, []), [])
