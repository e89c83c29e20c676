"""Difference between the requested and the measured slant and size of drawn digits, on slants seen in training and on
held-out slants.

Both are measured from the pixels. The same measurement of real handwriting, drawn with the same numbers, is the floor
of each value: it contains the measurement error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.data.sources.slanted_digits import COLUMNS, RANGES, drawn, is_held_out, measured_numbers
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import Detector
from image_diffusion.metrics.samples import Samples

_AT_ONCE = 100


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
    ranges = np.array([RANGES[name] for name in COLUMNS])
    scale = ranges[:, 1] - ranges[:, 0]
    errors = np.abs(_measured(samples) - numbers) / scale
    floor = np.abs(_measure_real(numbers) - numbers) / scale
    held_out = np.array([bool(is_held_out(slant)) for slant in numbers[:, 0]])
    groups = {"": np.ones_like(held_out), "_seen": ~held_out, "_held_out": held_out}
    return {
        f"error_{name}{group}": _entry(errors[chosen, i], floor[chosen, i])
        for group, chosen in groups.items()
        for i, name in enumerate(COLUMNS)
        if (chosen & ~np.isnan(numbers[:, i])).any()
    }


def _measured(samples: Samples) -> NDArray[np.float64]:
    """Return slant and size of each image, [N, 2]."""
    rows = []
    for start in range(0, samples.num_samples, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, samples.num_samples))
        for image in samples.gather(numbers).permute(0, 2, 3, 1).numpy():
            numbers_shown = measured_numbers(image)
            rows.append([numbers_shown[name] for name in COLUMNS])
    return np.array(rows)


def _measure_real(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return slant and size of real handwriting that is drawn with the numbers, [N, 2]; nan for missing numbers."""
    rows = []
    for number, (slant, size) in enumerate(numbers.tolist()):
        if np.isnan(slant) or np.isnan(size):
            rows.append([np.nan, np.nan])
        else:
            numbers_shown = measured_numbers(drawn(number, slant, size))
            rows.append([numbers_shown[name] for name in COLUMNS])
    return np.array(rows)


def _entry(errors: NDArray[np.float64], real: NDArray[np.float64]) -> dict[str, Any]:
    decided, floor = errors[~np.isnan(errors)], real[~np.isnan(real)]
    entry = mean_estimate(torch.from_numpy(decided), 0).as_dict()
    return entry | ({"floor": float(floor.mean()), "floor_n": len(floor)} if len(floor) else {})
