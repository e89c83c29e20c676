"""Check that weights are of the training that a configuration describes, first of all in the stages after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_diffusion.core.config.base import differing_keys, read_yaml
from image_diffusion.core.files.weights import read_model


def check_trained_by(folder: Path, config: Path | None) -> None:
    """Raise ValueError naming what differs when a weights folder is not of the training of a file, train.yaml.

    config: unset, nothing is asked. Numbers of steps, saves and logs count too: the file is all that a training is.
    """
    if config is None:
        return
    model = read_model(folder)
    trained: dict[str, Any] = {
        "train": model.get("train"), "system": model["system"], "codec": model["codec"]["config"],
    }  # fmt: skip
    described = read_yaml(config)
    if differing := differing_keys({key: described.get(key) for key in trained}, trained):
        raise ValueError(
            f"{folder} holds weights of another training than {config} describes: {'; '.join(differing)}. "
            f"Remove {folder / 'model.json'} and run the train stage again."
        )
