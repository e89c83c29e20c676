"""Weights trained by other projects, and the description that a reader needs to interpret them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from image_diffusion.codecs.base import CodecSettings
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.networks.weights import check_fit
from image_diffusion.systems.base import System, name_of

S = TypeVar("S", bound=System)


@dataclass(frozen=True)
class Description(Generic[S]):
    """The parts of an experiment that describe foreign weights: a system, and the data that it is trained on."""

    system: S
    data: DataConfig


def description_of(kind: type[S], system: System, data: DataConfig, weights: Path, experiment: Path) -> Description[S]:
    """Return the description of weights of this kind of system. system, data: of the experiment. weights, experiment:
    files, for the message. Raises ValueError for another kind of system."""
    if system.type != (name := name_of(kind)):
        raise ValueError(
            f"{weights} is of a system of type {name}, but {experiment} has system.type {system.type}. Use {name}."
        )
    return Description(cast("S", system), data)


class Described(Protocol):
    """Access to the experiment that describes the weights."""

    def __call__(self, kind: type[S], /) -> Description[S] | None:
        """Return the description; None if no experiment was named. Raises ValueError for an experiment of another type
        of system."""
        ...


@dataclass(frozen=True)
class ForeignWeights:
    """Weights trained by another project. tensors: by the network's names. description: the recognised model. unread:
    other entries of the file, by name. codec, identity: of the training data."""

    tensors: Mapping[str, Tensor]
    system: System
    spec: DataSpec
    description: str
    unread: tuple[str, ...] = ()
    codec: CodecSettings = field(default_factory=Rgb)
    identity: dict[str, Any] = field(default_factory=lambda: Rgb().identity)


def checked_weights(
    system: System, spec: DataSpec, tensors: Mapping[str, Tensor], path: Path, network: str
) -> dict[str, Tensor]:
    """Return tensors as float32 if they are those of a system's network. network: its name in the message. Raises
    ValueError as `check_fit` does."""
    with torch.device("meta"):
        expected = system.build_network(spec).state_dict()
    check_fit(expected, tensors, path, network)
    return {name: tensor.float() for name, tensor in tensors.items()}


Reader = Callable[[Mapping[str, Any], Path, str, Described], ForeignWeights | None]
"""Reader: the loaded content of a file (empty for a folder), its path, the folder of the latents' autoencoder, and the
experiment that describes properties missing from the file -> the weights, or None if they are of another kind. Raises
ValueError listing what is missing, unexpected or of another shape."""
