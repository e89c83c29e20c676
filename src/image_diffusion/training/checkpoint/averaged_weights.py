"""Weights of a training at any step and by any average that a stored checkpoint contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.config.base import differing_keys, read_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.training.checkpoint.checkpoint import (
    Checkpoint,
    damage_as_value_error,
    folder_name,
    read_checkpoint,
)
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import lora_of, written
from image_diffusion.training.optim.ema import average_name


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
    saved = _steps(run)
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
    keys = ("system", "spec", "codec", "classes", "untrained")
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
    saved = sorted((steps[-1].stat().st_mtime, run) for run in state.glob("*/") if (steps := _steps(run)))
    others: list[str] = []
    for _, run in reversed(saved):
        with damage_as_value_error(_steps(run)[-1]):
            identity = read_checkpoint(_steps(run)[-1])[1]
        saved_as = {"train": identity["train"], "system": identity["system"], "codec": identity["codec"]["config"]}
        differing = differing_keys(wanted, saved_as)
        if not differing:
            return run
        others += [f"that of {run.name} differs in {'; '.join(differing)}"]
    reason = f": {others[0]}" if others else ""
    raise ValueError(f"{state} holds no checkpoint of the training that {trained_by} describes{reason}. Wait for one.")


def _steps(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(path for path in run.glob("step-*") if path.is_dir())


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
