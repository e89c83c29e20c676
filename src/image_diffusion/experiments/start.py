"""Weights that a proposed training starts from, and the settings that they fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import CodecSettings
from image_diffusion.core.config.base import parse, shortest
from image_diffusion.core.files.weights import read_model
from image_diffusion.core.resolution import Size, resolution_of
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.experiment import train_of
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import System

_DOWNSAMPLINGS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Start:
    """Weights to start from. folder, step: of the weights. system, codec, optimizer: these sections; the optimizer is
    None for imported weights. depth, width, num_heads, grid: of the network. resolution, channels: of the images."""

    folder: Path
    step: int
    system: dict[str, Any]
    codec: dict[str, Any]
    optimizer: dict[str, Any] | None
    depth: int
    width: int
    num_heads: int
    grid: int
    resolution: int | Size
    channels: int

    def system_for(self, drops: float) -> dict[str, Any]:
        """Return the section `system`, with the share of examples whose label is dropped."""
        return self.system | {"objective": self.system.get("objective", {}) | {"label_drop_probability": drops}}


def start_of(folder: Path) -> Start:
    """Return the settings fixed by the weights in a folder. Raises ValueError for weights that no proposal can start
    from."""
    model, where = read_model(folder), f"{folder}/model.json"
    system: System = parse(AnySystem, model["system"], where)
    spec: DataSpec = parse(DataSpec, model["spec"], where)
    codec: CodecSettings = parse(CodecConfig, model["codec"]["config"], where)
    try:
        depth, width, num_heads, patch = system.started_shape()
    except ValueError as error:
        raise _unfit(folder, f"{error}, but a proposal starts from a dit with classes or none") from None
    if codec.trained_by is not None:
        raise _unfit(folder, f"are on the latents of the experiment {codec.trained_by}, which a new project lacks")
    train = train_of(type(system)).model_fields["optimizer"]
    images = _images(folder, spec, codec)
    return Start(
        folder.resolve(),
        model["step"],
        shortest(system.model_copy(update={"alignment": None})),
        shortest(codec),
        shortest(parse(train.annotation, model["train"]["optimizer"], where), train.default)
        if "train" in model
        else None,
        depth,
        width,
        num_heads,
        min(spec.size) // patch,
        images.resolution,
        images.channels,
    )


def _images(folder: Path, x: DataSpec, codec: CodecSettings) -> DataSpec:
    """Return the shape of the images that are encoded to this shape."""
    if codec.name is None:
        return x
    for factor in _DOWNSAMPLINGS:
        images = DataSpec(channels=3, resolution=resolution_of(x.size[0] * factor, x.size[1] * factor))
        try:
            if codec.spec(images, None).size == x.size:
                return images
        except ValueError:  # a side that is not a multiple of the autoencoder's factor
            continue
    raise _unfit(folder, f"are on latents of the codec {codec.name}, of which no size of images is known")


def _unfit(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"The weights in {folder} {reason}. Write train.init_from into an experiment of your own (docs/finetuning.md)."
    )
