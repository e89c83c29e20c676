"""Trainings of a few steps, as the command trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.stages.train import prepare_training
from image_diffusion.training.session import run


def trained_dit(folder: Path, crops: Path, network: dict[str, Any], steps: int, **train: Any) -> dict[str, Tensor]:
    """Train a DiT on four crops and return its weights; a second call in the same folder resumes."""
    folder.mkdir(exist_ok=True)
    settings = {"steps": steps, "global_batch": 4, "validate_every_steps": None, "grid_every_steps": None}
    settings |= {"ema": {"rates": [0.5]}}
    system = {"type": "dit", "network": network}
    stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "preview": {}, "train": settings | train}
    config = folder / "train.yaml"
    config.write_text(to_yaml(stage))
    training = prepare_training(config, crops / "manifest.json", None)
    run(training.build, training.stage.train, training.model, training.data, folder / "train")
    return read_weights(folder / "train")[0]
