"""The weights as they were at a step of a finished training, from the checkpoints it kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.weights import read_weights
from image_diffusion.training.checkpoint import Checkpoint, Damaged, folder_name, read_checkpoint


def weights_at(root: Path, final: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the model.json of a step, as training would have written them there.

    root: the folder `state` of an experiment, with a folder for each of its runs. final: the weights folder that the
    training wrote: the run is the one that ended with those weights. Raises ValueError when there is none, or the
    checkpoint of that step is not kept.
    """
    tensors, model = read_weights(final)
    if step == model["step"]:
        return tensors, model
    run = root / str(model.get("fingerprint"))
    if not run.is_dir():
        raise ValueError(f"No run in {root} ended with the weights {final}. Train again, or name its own state folder.")
    wanted = _read(run / folder_name(step))
    if wanted is None:
        raise ValueError(
            f"{run / folder_name(step)} is missing. Keep it with train.checkpoint.keep_every, and train again."
        )
    return _weights(wanted, model), {**model, "step": step, "examples_seen": wanted.examples_seen}


def _weights(checkpoint: Checkpoint, model: dict[str, Any]) -> dict[str, Tensor]:
    """The network's tensors, those that are averaged from the average that model.json names."""
    average = {} if model["ema"] is None else checkpoint.groups.get(model["ema"], {})
    return checkpoint.groups["network"] | average


def _read(folder: Path) -> Checkpoint | None:
    if not folder.is_dir():
        return None
    try:
        return read_checkpoint(folder)[0]
    except Damaged as damage:
        raise ValueError(f"Checkpoint {folder} is damaged: {damage}. Remove it, and train again.") from None
