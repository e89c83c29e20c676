"""Condition on a caption, which the stage `embed` has encoded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.core.devices import best_device, to_device
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import TEXT, DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import (
    EXAMPLE_PROMPTS,
    ConditionInputs,
    ConditionPart,
    SamplingRequest,
    ServedModel,
    read_prompts,
)
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.sampling import Column
from image_diffusion.text_encoders import encode_captions, encoder_of


class TextCondition(ConditionPart):
    """Captions, which the stage `embed` has encoded (section pairs)."""

    type: Literal["text"] = "text"
    """A caption of the image."""
    caption_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """Relative frequencies with which the first, second, … caption of an image is drawn; unset: all equal."""

    keys: ClassVar[frozenset[str]] = frozenset({"prompts", "negative_prompt"})
    reads: ClassVar[str] = "captions"
    pairs_example: ClassVar[str] = "{type: captions}"

    @field_validator("caption_weights")
    @classmethod
    def _draw_something(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and not sum(value) > 0:
            raise ValueError(f"{list(value)} would draw no caption. Give one of them a weight above 0.")
        return value

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError without prompts."""
        if settings.prompts is None:
            raise ValueError(
                f"{section}.prompts is missing: the network takes words. Write some, such as {section}: {{prompts: "
                f"[a photo of a dog]}}, or name a file of them."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes words. Name classes in the prompts.")
        super().check(section, settings, pairs)
        if isinstance(settings.prompts, tuple):
            read_prompts(settings.prompts, f"{section}.prompts")

    def check_pairs(self, pairs: Any, data: DataConfig) -> None:
        self.check_captions(pairs.num_captions)

    def check_captions(self, count: int) -> None:
        """Raise ValueError if the number of caption weights differs from the number of captions."""
        if self.caption_weights is not None and len(self.caption_weights) != count:
            raise ValueError(
                f"system.condition.caption_weights has {len(self.caption_weights)} numbers, but pairs.num_captions is "
                f"{count}. Give both the same number, or leave the weights out."
            )

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network: no classes, captions of [1 + L, dim]."""
        assert pairs is not None
        self.check_captions(pairs.shape[0])
        return spec.model_copy(update={"num_classes": 0, "conditions": {TEXT: tuple(pairs.shape[1:])}})

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return one of the captions of each image [B, captions, 1 + L, dim], drawn anew in every epoch."""
        has = stored[:, :, 0].any(dim=2)  # [B, K]
        weights = torch.ones_like(has, dtype=torch.float32)
        if self.caption_weights is not None:
            weights = weights * to_device(torch.tensor(self.caption_weights), has.device)
        weights = weights * has
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, has.float())  # all its captions have weight 0
        ends = weights.cumsum(1)
        drawn = streams.uniform("caption")[:, None] * ends[:, -1:]  # [B, 1]
        chosen = (drawn >= ends).sum(1).clamp(max=stored.shape[1] - 1)
        return {TEXT: stored[torch.arange(len(stored), device=stored.device), chosen].float()}

    def served(self, model: ServedModel) -> dict[str, Column]:
        return {"prompt": Column("string", required=True, example=EXAMPLE_PROMPTS)}

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the encoded prompts of the images: those of the section sample, or of the rows of a request."""
        settings, pairs, count = inputs.settings, inputs.pairs, len(inputs.seeds)
        if pairs is None:
            raise ValueError("The model does not say which text encoder it was trained with. Train it again.")
        if inputs.rows is not None:
            prompts = [str(row["prompt"]).strip() for row in inputs.rows]
        else:
            self.check("sample", settings)
            assert settings.prompts is not None
            prompts = read_prompts(settings.prompts, "sample.prompts")[:count]
        encoder = encoder_of(pairs, best_device())
        encoded = encode_captions(encoder, [*prompts, settings.negative_prompt])
        null = {TEXT: encoded[-1]} if settings.negative_prompt else {}
        of_images = [prompts[i % len(prompts)] for i in range(count)]
        return SamplingRequest(of_images, {TEXT: encoded[:-1]}, null, described={"prompts": of_images})
