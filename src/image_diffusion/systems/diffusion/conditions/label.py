"""Condition on the class of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import ConditionPart, ImageSource
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest


class LabelCondition(ConditionPart):
    """Condition on the class of an image, where the data have any."""

    type: Literal["label"] = "label"
    """Condition on the class of the image, or no condition."""

    takes_classes: ClassVar[bool] = True
    keys: ClassVar[frozenset[str]] = frozenset({"labels"})

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        super().check(section, settings, pairs)

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
