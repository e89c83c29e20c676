"""Condition on the class of an image."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from image_diffusion.systems.diffusion.conditions.base import (
    ConditionInputs,
    ConditionPart,
    SamplingRequest,
    ServedModel,
)
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.sampling import Column


class LabelCondition(ConditionPart):
    """Condition on the class of an image, if the data have classes."""

    type: Literal["label"] = "label"
    """Condition on the class of the image, or no condition."""

    takes_classes: ClassVar[bool] = True
    keys: ClassVar[frozenset[str]] = frozenset({"labels"})

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        super().check(section, settings, pairs)

    def served(self, model: ServedModel) -> dict[str, Column]:
        """Return the columns of the number and the name of a class, if the data have classes."""
        if not model.classes:
            return {}
        return {"label": Column("long"), "class": Column("string", example=(model.classes[0], model.classes[-1]))}

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the samples other than classes: none."""
        return SamplingRequest()
