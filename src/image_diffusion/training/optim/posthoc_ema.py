"""Reconstruct an average of any width after training from stored averages of a few widths.

Karras et al. 2024, section 3.2: each stored average is an integral of the weights over time with a known profile. A
linear combination of averages has the same combination of their profiles, which least squares fits to the wanted
profile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.training.checkpoint.checkpoint import damage_as_value_error, read_group, read_record
from image_diffusion.training.finetune import lora_of, written
from image_diffusion.training.optim.ema import average_name, power_of_width

Profiles = NDArray[np.float64]

_THEN = "run this again"  # without a damaged checkpoint there are others to combine


@dataclass(frozen=True)
class KeptAverage:
    """A stored average: its checkpoint, the record of the checkpoint, its name in the checkpoint, and its exponent
    gamma."""

    folder: Path
    record: dict[str, Any]
    name: str
    gamma: float


def inner_products(times: Profiles, gammas: Profiles, other_times: Profiles, other_gammas: Profiles) -> Profiles:
    """Compute the inner products of the profiles p(s) = (gamma + 1) s^gamma / t^(gamma + 1), 0 <= s <= t: [n], [n],
    [m], [m] -> [n, m].

    The integral of the product over their common time is
    (g + 1) (h + 1) / (g + h + 1) min(t, u)^(g + h + 1) / (t^(g + 1) u^(h + 1)), computed in logarithms.
    """
    t, g = times[:, None], gammas[:, None]
    u, h = other_times[None, :], other_gammas[None, :]
    both = g + h + 1.0
    powers = both * np.log(np.minimum(t, u)) - (g + 1.0) * np.log(t) - (h + 1.0) * np.log(u)
    return np.asarray((g + 1.0) * (h + 1.0) / both * np.exp(powers))


def coefficients(steps: Sequence[int], gammas: Sequence[float], step: int, gamma: float) -> Profiles:
    """Return the coefficient of each kept average: the least-squares fit of their profiles to the wanted one."""
    t, g = np.array(steps, dtype=np.float64), np.array(gammas, dtype=np.float64)
    wanted = inner_products(t, g, np.array([float(step)]), np.array([gamma]))
    solution = np.linalg.lstsq(inner_products(t, g, t, g), wanted[:, 0], rcond=1e-13)[0]
    return np.asarray(solution / solution.sum(), dtype=np.float64)


def kept_averages(state: Path, last_step: int = sys.maxsize) -> list[KeptAverage]:
    """Return the averages in the checkpoints of a run's state folder, up to a step: later checkpoints are of a longer
    configuration of the run. Raises ValueError if there are none to combine."""
    averages = []
    for folder in sorted(state.glob("step-*")):
        if int(folder.name.removeprefix("step-")) > last_step:
            continue
        with damage_as_value_error(folder, _THEN):
            record = read_record(folder)
        ema: dict[str, Any] = record["identity"]["train"]["ema"]
        if ema["type"] != "power":
            raise ValueError(
                f"{state} was trained with train.ema of type {ema['type']}. Only power can be combined; one that was "
                "kept is had with --average."
            )
        averages += [KeptAverage(folder, record, average_name(width), power_of_width(width)) for width in ema["widths"]]
    if not averages:
        raise ValueError(
            f"{state} holds no checkpoint. Give the folder of one run: results/x/train/state/<fingerprint>."
        )
    return averages


def reconstruct(state: Path, width: float, last_step: int = sys.maxsize) -> tuple[dict[str, Tensor], int]:
    """Return the weights averaged with a relative width, and their step, the last stored step up to `last_step`. Sums
    are float64, with one average in memory at a time. Raises ValueError as `kept_averages` does.
    """
    kept = kept_averages(state, last_step)
    steps = [int(average.record["step"]) for average in kept]
    last = max(steps)
    factors = coefficients(steps, [k.gamma for k in kept], last, power_of_width(width))
    newest = max(kept, key=lambda average: average.folder)
    with damage_as_value_error(newest.folder, _THEN):
        network = read_group(newest.folder, newest.record, "network")
    sums: dict[str, Tensor] = {}
    for factor, average in zip(factors.tolist(), kept, strict=True):
        with damage_as_value_error(average.folder, _THEN):
            weights = read_group(average.folder, average.record, average.name)
        for name, tensor in weights.items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + factor * tensor.double()
    averaged = {name: tensor.to(network[name].dtype) for name, tensor in sums.items()}
    return written(network | averaged, lora_of(newest.record["identity"])), last
