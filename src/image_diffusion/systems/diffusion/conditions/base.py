"""Interface of the parts of a condition, and checks that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.rows import Row
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest
from image_diffusion.systems.sampling import Column, Embed


@dataclass(frozen=True)
class ImageSource:
    """Images that are the condition of a network, or that the condition is computed from. spec: of the network. source:
    held-out images; the folder of their crops, or a samples.npz; None: none is named."""

    spec: DataSpec
    source: Shards | Path | None = None


@dataclass(frozen=True)
class ConditionInputs:
    """Inputs from which the conditions of images to be made are taken.

    settings: the section sample. seeds: of the images, int64 [N]. pairs: entries of the manifest of the paired shards:
    by kind for `Conditions`, of its own kind for a part. source: held-out images with their pairs, or the folders of
    those. image_source: of the images of a condition. rows: the requested conditions; image i has row i modulo their
    number; None: none. key: the key of the rows, for messages. is_request: True for the rows of a request of a served
    model, which hold the content of files in place of paths. embed: computes embeddings of captions, if a model for
    them is available.
    """

    settings: SampleConfig
    seeds: Tensor
    pairs: Mapping[str, Any] | None = None
    source: Shards | Sequence[Path] = ()
    image_source: ImageSource | None = None
    rows: Sequence[Row] | None = None
    key: str = "sample.conditions"
    is_request: bool = False
    embed: Embed | None = None


@dataclass(frozen=True)
class ServedFrom:
    """Properties of a model that decide the columns of a request. spec: of its data. classes: their names by number.
    pairs: what the manifest of the shards beside the images says of them; of each kind for `Conditions`, of its own for
    a part. embeds: whether a model that makes embeddings of captions is served with it."""

    spec: DataSpec
    classes: Sequence[str]
    pairs: Mapping[str, Any] | None = None
    embeds: bool = False


class ConditionPart(Config, ABC):
    """Part of the condition of a network: itself the condition, or one of several (`Conditions`). Its `type` is the
    name of the condition in `DataSpec.conditions` and in the inputs of the network."""

    takes_classes: ClassVar[bool] = False
    """True if the part is the class of an image."""
    keys: ClassVar[frozenset[str]]
    """Keys of the section sample that say what images are conditioned on."""
    reads: ClassVar[str | None] = None
    """Kind of the shards beside the images that it is read from; None: no shards are read."""
    pairs_example: ClassVar[str]
    """Set of the section `pairs` that provides these shards, as messages suggest it."""
    source_key: ClassVar[str]
    """Key of the section sample that names the source of `draws`."""
    source_advice: ClassVar[str]
    """Advice of messages where this key is unset and no images are held out."""

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings that do nothing or are missing. section: their name. pairs: the section
        pairs, where it is known."""
        check_unused(section, settings, self.keys)

    def check_pairs(self, pairs: Any, data: DataConfig) -> None:
        """Raise ValueError where the section pairs does not fit the part or the data."""

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the shapes that a network has to be built for."""
        return spec

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the conditions of stored samples other than the class, by name, from the shards beside them. spec: of
        the network."""
        return {}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source that images are made of beside the settings: "validation" for held-out images; None
        without one."""
        return None

    def pictures(self, settings: SampleConfig) -> list[Path]:
        """Return the files of images that the settings name. Raises ValueError where a folder holds none."""
        return []

    def names(self, pairs: Any) -> tuple[str, ...]:
        """Return the columns of rows (sample.conditions) that the part reads. pairs: the section pairs, or what a
        manifest says of it."""
        return ()

    @abstractmethod
    def served(self, model: ServedFrom) -> dict[str, Column] | None:
        """Return the columns that a request of a served model has for the part; None: no request can name it. Raises
        ValueError for a model that does not say enough."""

    @abstractmethod
    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the images to be made."""


_UNUSED = {
    "embeddings": "embeddings. Leave it out, or set system.condition.type to embedding",
    "conditions": "numbers. Leave it out, or add {type: numbers} or an image to system.condition",
    "small_images": "image. Leave it out, or add {type: image, from: self, shrink: N} to system.condition",
}
"""Ends of the message by the key that is set: the thing that a network does not take, and what to do."""


def check_unused(section: str, settings: SampleConfig, keys: Container[str]) -> None:
    """Raise ValueError for embeddings, numbers or images that are set and that no sample would use. section: the name
    of the settings. keys: those that the condition uses."""
    for key, advice in _UNUSED.items():
        if key not in keys and getattr(settings, key, None) is not None:
            raise ValueError(f"{section}.{key} is set, but the network takes no {advice}.")
