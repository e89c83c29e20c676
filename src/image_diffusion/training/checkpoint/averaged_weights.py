"""Weights of a training from its stored checkpoints: at any step, by any average that a checkpoint contains, or by one
of any width that is reconstructed from averages of a few widths.

Karras et al. 2024, section 3.2: each stored average is an integral of the weights over time with a known profile. A
linear combination of averages has the same combination of their profiles, which least squares fits to the wanted
profile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.config.base import differing_keys, read_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.training.checkpoint.checkpoint import (
    Checkpoint,
    checkpoints_in,
    damage_as_value_error,
    folder_name,
    read_checkpoint,
    read_group,
    read_record,
)
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import lora_of, written
from image_diffusion.training.optim.ema import average_name, power_of_width

Profiles = NDArray[np.float64]

_THEN = "run this again"  # without a damaged checkpoint there are others to combine


def weights_at(
    root: Path, final: Path, step: int | None = None, average: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the model.json of a step, as training would have written them at that step.

    root: the folder `state` of an experiment, with a folder for each of its runs. final: the weights folder that the
    training wrote, which identifies the run. step: unset: the step of these weights. average: its name, or "raw" for
    the weights as trained; unset: the average that was written. Raises ValueError if no such run exists, or the
    checkpoint of that step, or that average, is not kept.
    """
    tensors, model = read_weights(final)
    step = model["step"] if step is None else step
    wanted = model["ema"] if average is None else _named(average)
    if (step, wanted) == (model["step"], model["ema"]):
        return tensors, model
    run = root / str(model.get("fingerprint"))
    if not run.is_dir():
        raise ValueError(f"No run in {root} ended with the weights {final}. Train again, or name its own state folder.")
    folder = run / folder_name(step)
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing. Keep it with train.checkpoint.keep_every, and train again.")
    with damage_as_value_error(folder):
        checkpoint, identity = read_checkpoint(folder)
    described = {**model, "step": step, "examples_seen": checkpoint.examples_seen, "ema": wanted}
    return _weights(checkpoint, wanted, identity), described


def weights_in(
    state: Path, step: int | None = None, average: str | None = None, trained_by: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the model.json of a step of a run that may still be training. Reads only its checkpoints.

    state: the folder of one run, or of all if it holds only one. step: unset: the last. average: unset: the only one
    that exists. trained_by: the file train.yaml of the run, which identifies the run and names the average that will be
    written. Raises ValueError if the choice is not clear, or no such checkpoint or average exists.
    """
    run = _only_run(state) if trained_by is None else _run_of(state, trained_by)
    if trained_by is not None and average is None:
        average = TrainConfig.model_validate(read_yaml(trained_by)["train"]).average or "raw"
    saved = checkpoints_in(run)
    folder = saved[-1] if step is None else run / folder_name(step)
    if folder not in saved:
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in saved)
        raise ValueError(f"{run} holds no checkpoint of step {step}. Steps that are kept: {steps}.")
    with damage_as_value_error(folder):
        checkpoint, identity = read_checkpoint(folder)
    names = sorted(name for name in checkpoint.groups if name.startswith("ema-"))
    if average is None and len(names) > 1:
        raise ValueError(f"{folder} holds the averages {', '.join(names)}. Name the number of one, or raw.")
    wanted = _named(average) if average is not None else next(iter(names), None)
    keys = ("system", "spec", "codec", "classes", "data", "untrained")
    about = {"step": checkpoint.step, "examples_seen": checkpoint.examples_seen, "ema": wanted}
    about["fingerprint"] = run.name
    return _weights(checkpoint, wanted, identity), {key: identity[key] for key in keys if key in identity} | about


def _only_run(state: Path) -> Path:
    runs = sorted({path.parent for path in (*state.glob("step-*"), *state.glob("*/step-*"))})
    if len(runs) != 1:
        contents = f"the runs {', '.join(run.name for run in runs)}" if runs else "no checkpoint"
        raise ValueError(f"{state} holds {contents}. Give the folder of one run: results/x/train/state/<fingerprint>.")
    return runs[0]


def _run_of(state: Path, trained_by: Path) -> Path:
    """Return the run that a file train.yaml describes; of several runs on different data, the one that saved last."""
    described = read_yaml(trained_by)
    config: dict[str, Any] = json.loads(json.dumps(TrainConfig.model_validate(described["train"]).identity()))
    wanted = {"train": config, "system": described["system"], "codec": described["codec"]}
    saved = sorted((steps[-1].stat().st_mtime, run) for run in state.glob("*/") if (steps := checkpoints_in(run)))
    others: list[str] = []
    for _, run in reversed(saved):
        with damage_as_value_error(checkpoints_in(run)[-1]):
            identity = read_checkpoint(checkpoints_in(run)[-1])[1]
        saved_as = {"train": identity["train"], "system": identity["system"], "codec": identity["codec"]["config"]}
        differing = differing_keys(wanted, saved_as)
        if not differing:
            return run
        others += [f"that of {run.name} differs in {'; '.join(differing)}"]
    reason = f": {others[0]}" if others else ""
    raise ValueError(f"{state} holds no checkpoint of the training that {trained_by} describes{reason}. Wait for one.")


def _named(average: str) -> str | None:
    """Return the name of an average that a user gave as `raw` or as the number of a rate or width."""
    if average == "raw":
        return None
    try:
        return average_name(float(average.removeprefix("ema-")))
    except ValueError:
        raise ValueError(f"'{average}' is not an average. Use the number of a rate or a width, or raw.") from None


def _weights(checkpoint: Checkpoint, average: str | None, identity: dict[str, Any]) -> dict[str, Tensor]:
    """Return the network's tensors, with averaged parameters from an average. identity: the identity of the run."""
    if average is not None and average not in checkpoint.groups:
        averages = ", ".join(sorted(name for name in checkpoint.groups if name.startswith("ema-"))) or "none"
        raise ValueError(f"There is no average {average} at step {checkpoint.step:,}. Kept are: {averages}.")
    averaged = checkpoint.groups[average] if average is not None else {}
    return written(checkpoint.groups["network"] | averaged, lora_of(identity))


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


def reconstruct(state: Path, width: float, last_step: int = sys.maxsize) -> tuple[dict[str, Tensor], int]:
    """Return the weights averaged with a relative width, and their step, the last stored step up to `last_step`: later
    checkpoints are of a longer configuration of the run. Sums are float64, with one average in memory at a time. Raises
    ValueError if there are none to combine."""
    records: dict[Path, dict[str, Any]] = {}
    kept: list[tuple[Path, float]] = []  # the stored averages: checkpoint and width of each
    for folder in sorted(state.glob("step-*")):
        if int(folder.name.removeprefix("step-")) > last_step:
            continue
        with damage_as_value_error(folder, _THEN):
            records[folder] = read_record(folder)
        ema: dict[str, Any] = records[folder]["identity"]["train"]["ema"]
        if ema["type"] != "power":
            raise ValueError(
                f"{state} was trained with train.ema of type {ema['type']}. Only power can be combined; one that was "
                "kept is had with --average."
            )
        kept += [(folder, its_width) for its_width in ema["widths"]]
    if not kept:
        raise ValueError(
            f"{state} holds no checkpoint. Give the folder of one run: results/x/train/state/<fingerprint>."
        )
    steps = [int(records[folder]["step"]) for folder, _ in kept]
    gammas = [power_of_width(its_width) for _, its_width in kept]
    factors = coefficients(steps, gammas, max(steps), power_of_width(width))
    newest = max(records)
    with damage_as_value_error(newest, _THEN):
        network = read_group(newest, records[newest], "network")
    sums: dict[str, Tensor] = {}
    for factor, (folder, its_width) in zip(factors.tolist(), kept, strict=True):
        with damage_as_value_error(folder, _THEN):
            weights = read_group(folder, records[folder], average_name(its_width))
        for name, tensor in weights.items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + factor * tensor.double()
    averaged = {name: tensor.to(network[name].dtype) for name, tensor in sums.items()}
    return written(network | averaged, lora_of(records[newest]["identity"])), max(steps)
