"""Condition on the class of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import ImageSource, check_no_conditions, check_no_embeddings
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest


class LabelCondition(Config):
    """Condition on the class of an image, where the data have any."""

    type: Literal["label"] = "label"
    """Condition on the class of the image, or no condition."""

    takes_classes: ClassVar[bool] = True
    keys: ClassVar[frozenset[str]] = frozenset({"labels"})

    @property
    def reads(self) -> str | None:
        """Return the kind of the shards next to the images: none."""
        return None

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        check_no_embeddings(section, settings)
        check_no_conditions(section, settings)

    def check_pairs(self, pairs: Any) -> None:
        """Accept any experiment: a class needs no shards beside the images."""

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the shapes that a network has to be built for."""
        return spec

    def training_conditions(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Return the conditions of stored samples other than the class: none."""
        return {}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the embeddings that images are made of: none."""
        return None

    def sampling_request(
        self,
        settings: SampleConfig,
        pairs: Mapping[str, Any] | None,
        count: int,
        source: Shards | Sequence[Path] = (),
        image_source: ImageSource | None = None,
    ) -> SamplingRequest:
        """Return the conditions of `count` images, beside classes: nothing."""
        return SamplingRequest()
