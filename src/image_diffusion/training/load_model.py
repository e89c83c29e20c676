"""Load a trained model from its weights folder: network, system and codec; and check its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import differing_keys, parse, read_yaml
from image_diffusion.core.files.weights import read_model, read_weights
from image_diffusion.core.types import NUMBERS, DataSpec
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import Model, System
from image_diffusion.systems.pairs.inputs import pairs_by_kind


def load_model(folder: Path) -> Model:
    """Load the model in a weights folder. Raises ValueError if its files are missing or do not fit."""
    tensors, model = read_weights(folder)
    where = f"{folder}/model.json"
    system: System = parse(AnySystem, model["system"], where)
    spec = parse(DataSpec, model["spec"], where)
    network = system.build_network(spec)
    pairs = pairs_by_kind(model.get("pairs"), system.joined_kinds or ("pairs",))
    if "missing_numbers" in model:
        pairs[NUMBERS] = pairs[NUMBERS] | {"missing": model["missing_numbers"]}
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder}/weights.safetensors does not fit the network in {where}: {error}") from None
    return Model(
        network=network.eval().requires_grad_(False),
        system=system,
        spec=spec,
        codec=model["codec"],
        classes=model["classes"],
        untrained=tuple(model.get("untrained", ())),
        step=model["step"],
        examples_seen=model["examples_seen"],
        sha256=model["sha256"],
        num_steps=model["train"]["steps"] if "train" in model else model["step"],
        fingerprint=model.get("fingerprint", ""),
        pairs=pairs,
        folder=folder,
    )


def load_codec(model: Model, weights: Path | None, device: torch.device) -> Codec:
    """Return the codec of a model. weights: the folder of the experiment that trained the codec, if any.

    Raises ValueError when that folder now holds another codec.
    """
    config = parse(CodecConfig, model.codec["config"], "model.json: codec")
    codec: Codec = config.build(weights, model.codec["scale"], device, torch.float32)
    if codec.identity != model.codec["identity"]:
        raise ValueError(
            f"The model was trained on latents of the codec {model.codec['identity']}, but {weights} now holds "
            f"{codec.identity}. Train the model again, or restore that codec."
        )
    return codec


def check_trained_by(folder: Path, config: Path | None) -> None:
    """Raise ValueError that names the differences if a train.yaml does not describe the training of a weights folder.

    config: path of the file; None: no check. The numbers of steps, checkpoints and logs are compared as well.
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
