"""Whether painted digits have what their prompts name, on combinations that training has seen and on those held out.

Colours, slant and size are measured in the pixels, the digit is told by the detector. The same judge looks at the real
handwriting painted as the same prompts say: its own mistakes are the floor of each number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.data.sources.painted import (
    GROUNDS,
    INKS,
    SIZES,
    SLANTS,
    Attributes,
    attributes_in,
    attributes_of,
    measured,
    painted,
)
from image_diffusion.metrics.features import Detector, detect
from image_diffusion.metrics.intervals import mean_estimate
from image_diffusion.metrics.moments import block_of_each
from image_diffusion.metrics.samples import Samples

NAMES = tuple(field.name for field in fields(Attributes))


def evaluate_painted(samples: Samples, detectors: Sequence[Detector]) -> dict[str, Any]:
    """Entries of metrics.json by name: "agreement_ink" and so on, of each attribute the share of the images of which it
    was asked that have it; "attributes_seen" and "attributes_held_out": of all that was asked of an image the share
    that it has, over images of combinations that training has seen, and of those that it has not.

    The digit is told by the first detector that knows digits. Raises ValueError for samples without prompts, and where
    no detector does.
    """
    prompts: list[str] = samples.protocol.get("prompts", [])
    if len(prompts) != samples.num_samples:
        raise ValueError("evaluate.attributes is set, but the samples have no prompts. Judge those of a text model.")
    detector = next((each for each in detectors if each.classes), None)
    if detector is None:
        raise ValueError("evaluate.attributes is set, but no detector knows digits. Add inpipe to evaluate.detectors.")
    asked = [attributes_in(prompt) for prompt in prompts]
    right = _right(samples, asked, detector)
    real = _right(_painted(asked), asked, detector)
    held_out = np.array([each.is_held_out for each in asked])
    named = ~np.isnan(right)
    entries = {
        f"agreement_{name}": _entry(right[:, i], real[:, i]) for i, name in enumerate(NAMES) if named[:, i].any()
    }
    for name, chosen in (("seen", ~held_out), ("held_out", held_out)):
        if (some := chosen & named.any(axis=1)).any():
            entries[f"attributes_{name}"] = _entry(np.nanmean(right[some], axis=1), np.nanmean(real[some], axis=1))
    return entries


def _right(samples: Samples, asked: list[Attributes], detector: Detector) -> NDArray[np.float64]:
    """[N, 5]: 1 where an image has the attribute that was asked for, 0 where not, nan where none was."""
    logits = detect(detector, samples, "digits").logits
    assert logits is not None
    found = np.full((len(asked), len(NAMES)), np.nan)
    for i, (wanted, digit) in enumerate(zip(asked, logits.argmax(dim=1).tolist(), strict=True)):
        image = samples.gather(np.array([i]))[0].permute(1, 2, 0).numpy()
        seen = replace(measured(image), digit=detector.classes[digit])
        for j, name in enumerate(NAMES):
            if (word := getattr(wanted, name)) is not None:
                found[i, j] = getattr(seen, name) == word
    return found


def _painted(asked: list[Attributes]) -> Samples:
    """Real handwriting with the attributes that were asked for, and the first that there is where one was left open."""
    of_digit: dict[str | None, list[int]] = {}
    for number in range(1000):
        of_digit.setdefault(attributes_of(number).digit, []).append(number)
    of_digit[None] = list(range(1000))
    usual = Attributes(None, *(next(iter(known)) for known in (INKS, GROUNDS, SLANTS, SIZES)))
    images = []
    for i, each in enumerate(asked):
        numbers = of_digit[each.digit]
        words = {name: getattr(each, name) or getattr(usual, name) for name in NAMES}
        images.append(painted(numbers[i % len(numbers)], Attributes(**words)))
    return Samples(np.stack(images), None, [])


def _entry(right: NDArray[np.float64], real: NDArray[np.float64]) -> dict[str, Any]:
    known, floor = right[~np.isnan(right)], real[~np.isnan(real)]
    estimate = mean_estimate(torch.from_numpy(known), block_of_each(len(known)), 0, 1)
    return estimate.as_dict() | {"floor": float(floor.mean()), "floor_n": len(floor)}
