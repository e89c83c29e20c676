"""Interface of a condition of a network, and of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest


@dataclass(frozen=True)
class ImageSource:
    """Images that a network is conditioned on, or that what it is conditioned on is made of. spec: of the network.
    source: held-out images; the folder of their crops, or a samples.npz; None: none is named."""

    spec: DataSpec
    source: Shards | Path | None = None


class Condition(Protocol):
    """Condition of a network: one part, or several (`Conditions`).

    type: its name. takes_classes: whether the class of an image is part of it. keys: those of the section sample that
    say what images are conditioned on.
    """

    @property
    def type(self) -> str: ...

    @property
    def takes_classes(self) -> bool: ...

    @property
    def keys(self) -> frozenset[str]: ...

    @property
    def reads(self) -> str | None:
        """Return the kind of the shards beside the images; None: none are read."""
        ...

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings that do nothing or are missing. section: their name. pairs: the section
        pairs, where it is known."""
        ...

    def check_pairs(self, pairs: Any) -> None:
        """Raise ValueError where the section pairs does not fit."""
        ...

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the shapes that a network has to be built for."""
        ...

    def training_conditions(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Return the conditions of stored samples other than the class, by name, from the shards beside them."""
        ...

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source that images are made of beside the settings: "validation" for held-out images."""
        ...

    def sampling_request(
        self,
        settings: SampleConfig,
        pairs: Mapping[str, Any] | None,
        count: int,
        source: Shards | Sequence[Path] = (),
        image_source: ImageSource | None = None,
    ) -> SamplingRequest:
        """Return the conditions of `count` images. pairs: what the manifest of the shards says of them. source:
        held-out images with what lies beside them, or the folders of those. image_source: of the images of a
        condition."""
        ...


def check_no_embeddings(section: str, settings: SampleConfig) -> None:
    """Raise ValueError if embeddings are set that no image would use."""
    if settings.embeddings is not None:
        raise ValueError(
            f"{section}.embeddings is set, but the network takes no embeddings. Leave it out, or set "
            f"system.condition.type to embedding."
        )


def check_no_conditions(section: str, settings: SampleConfig) -> None:
    """Raise ValueError if numbers are set that no image would use."""
    if settings.conditions is not None:
        raise ValueError(
            f"{section}.conditions is set, but the network takes no numbers. Leave it out, or add {{type: numbers}} to "
            f"system.condition."
        )


def check_no_images(section: str, settings: SampleConfig, image: object) -> None:
    """Raise ValueError if images are set that no sample would use. image: the part of the condition that takes them."""
    if settings.small_images is not None and image is None:
        raise ValueError(
            f"{section}.small_images is set, but the network takes no image. Leave it out, or add {{type: image, from: "
            f"self, shrink: N}} to system.condition."
        )
