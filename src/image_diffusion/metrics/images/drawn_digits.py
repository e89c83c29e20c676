"""Agreement of drawn digits with the attributes named in their prompts, or with the requested slant and size, on
combinations or slants seen in training and on held-out ones.

Colours, slant and size are measured from the pixels; a detector recognises the digit. The same evaluation of real
handwriting, drawn according to the same prompts or numbers, is the floor of each value: it contains the evaluation's
own errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.data.sources.scikit_digits import (
    COLUMNS,
    GROUNDS,
    INKS,
    RANGES,
    SIZES,
    SLANTS,
    Attributes,
    attributes_in,
    attributes_of,
    drawn,
    is_held_out,
    measured,
    measured_numbers,
    painted,
)
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import Detector, detect
from image_diffusion.metrics.samples import Samples

NAMES = tuple(field.name for field in fields(Attributes))


def evaluate_painted(samples: Samples, detectors: Sequence[Detector]) -> dict[str, Any]:
    """Return entries of metrics.json by name: "agreement_ink" and so on, the share of images that show an attribute
    among those whose prompt names it; "attributes_seen" and "attributes_held_out", the mean share of the attributes of
    its prompt that an image shows, over images of combinations that training has or has not seen.

    The first detector with the classes of digits recognises the digit. Raises ValueError for samples without prompts
    and if there is no such detector.
    """
    prompts: list[str] = samples.protocol.get("prompts", [])
    if len(prompts) != samples.num_samples:
        raise ValueError("evaluate.attributes is set, but the samples have no prompts. Judge those of a text model.")
    detector = next((candidate for candidate in detectors if candidate.classes), None)
    if detector is None:
        raise ValueError(
            "evaluate.attributes is set, but no detector has the classes of digits. Add inpipe to evaluate.detectors."
        )
    requested = [attributes_in(prompt) for prompt in prompts]
    right = _right(samples, requested, detector)
    real = _right(_painted(requested), requested, detector)
    held_out = np.array([attributes.is_held_out for attributes in requested])
    named = ~np.isnan(right)
    entries = {
        f"agreement_{name}": _entry(right[:, i], real[:, i]) for i, name in enumerate(NAMES) if named[:, i].any()
    }
    for name, chosen in (("seen", ~held_out), ("held_out", held_out)):
        if (some := chosen & named.any(axis=1)).any():
            entries[f"attributes_{name}"] = _entry(np.nanmean(right[some], axis=1), np.nanmean(real[some], axis=1))
    return entries


def _right(samples: Samples, requested: list[Attributes], detector: Detector) -> NDArray[np.float64]:
    """Return [N, 5]: 1 if an image has the attribute of its prompt, 0 if not, nan if the prompt names none."""
    logits = detect(detector, samples, "digits").logits
    assert logits is not None
    right = np.full((len(requested), len(NAMES)), np.nan)
    for i, (attributes, digit) in enumerate(zip(requested, logits.argmax(dim=1).tolist(), strict=True)):
        recognised = replace(measured(_picture(samples, i)), digit=detector.classes[digit])
        for j, name in enumerate(NAMES):
            if (word := getattr(attributes, name)) is not None:
                right[i, j] = getattr(recognised, name) == word
    return right


def _painted(requested: list[Attributes]) -> Samples:
    """Return real handwriting with the attributes of the prompts; the first possible value replaces an unnamed
    attribute."""
    of_digit: dict[str | None, list[int]] = {}
    for number in range(1000):
        of_digit.setdefault(attributes_of(number).digit, []).append(number)
    of_digit[None] = list(range(1000))
    usual = Attributes(None, *(next(iter(choices)) for choices in (INKS, GROUNDS, SLANTS, SIZES)))
    images = []
    for i, attributes in enumerate(requested):
        numbers = of_digit[attributes.digit]
        words = {name: getattr(attributes, name) or getattr(usual, name) for name in NAMES}
        images.append(painted(numbers[i % len(numbers)], Attributes(**words)))
    return Samples(np.stack(images), None, [])


def evaluate_drawn(samples: Samples, detectors: Sequence[Detector]) -> dict[str, Any]:
    """Return entries of metrics.json by name: "error_slant" and "error_size", the mean absolute difference between the
    measured and the requested number, as a share of its range; with the suffix "_seen" or "_held_out", over the images
    whose slants training has or has not seen.

    Missing numbers are not evaluated. Raises ValueError for samples without slant or size.
    """
    asked: Mapping[str, Any] = samples.protocol.get("conditions", {}).get("values", {})
    if any(len(asked.get(name, ())) != samples.num_samples for name in COLUMNS):
        raise ValueError(
            "evaluate.attributes is slanted_digits, but the samples were not made of slant and size. Judge those of a "
            "model with pairs.columns [slant, size]."
        )
    numbers = np.array([[np.nan if value is None else value for value in asked[name]] for name in COLUMNS]).T  # [N, 2]
    scale = np.array([high - low for low, high in (RANGES[name] for name in COLUMNS)])
    errors = np.abs(_measured(samples) - numbers) / scale
    floor = np.abs(_measure_real(numbers) - numbers) / scale
    held_out = np.array([bool(is_held_out(slant)) for slant in numbers[:, 0]])
    groups = {"": np.ones_like(held_out), "_seen": ~held_out, "_held_out": held_out}
    return {
        f"error_{name}{group}": _entry(errors[chosen, i], floor[chosen, i], np.inf)
        for group, chosen in groups.items()
        for i, name in enumerate(COLUMNS)
        if (chosen & ~np.isnan(numbers[:, i])).any()
    }


def _measured(samples: Samples) -> NDArray[np.float64]:
    """Return slant and size of each image, [N, 2]."""
    return np.array([_shown_numbers(_picture(samples, i)) for i in range(samples.num_samples)])


def _measure_real(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return slant and size of real handwriting that is drawn with the numbers, [N, 2]; nan for missing numbers."""
    rows = np.full(numbers.shape, np.nan)
    for i in np.flatnonzero(~np.isnan(numbers).any(axis=1)).tolist():
        rows[i] = _shown_numbers(drawn(i, *numbers[i].tolist()))
    return rows


def _shown_numbers(image: NDArray[np.uint8]) -> list[float]:
    """Return slant and size of an image [H, W, C]."""
    shown = measured_numbers(image)
    return [shown[name] for name in COLUMNS]


def _picture(samples: Samples, i: int) -> NDArray[np.uint8]:
    picture: NDArray[np.uint8] = samples.gather(np.array([i]))[0].permute(1, 2, 0).numpy()
    return picture


def _entry(values: NDArray[np.float64], real: NDArray[np.float64], most: float = 1.0) -> dict[str, Any]:
    """Return the entry of the mean of the known values, from 0 to `most`. real: of real handwriting."""
    known, floor = values[~np.isnan(values)], real[~np.isnan(real)]
    entry = mean_estimate(torch.from_numpy(known), 0, most).as_dict()
    return entry | ({"floor": float(floor.mean()), "floor_n": len(floor)} if len(floor) else {})
