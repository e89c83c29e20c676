"""Conditions of an image diffusion: a class, a text, or an image embedding. Each condition is one class, which defines
the shards that are stored next to the images, the shapes of the network's inputs, the conditions of stored samples, and
those of requested images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import best_device
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec, SamplesOf
from image_diffusion.data.encoded.pairs import IMAGE
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.image_embeddings import held_out, of_folder, of_held_out
from image_diffusion.systems.diffusion.prompts import read_prompts
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest
from image_diffusion.text_encoders.base import encode_captions
from image_diffusion.text_encoders.rebuild import encoder_of


class LabelCondition(Config):
    """Condition on the class of an image, where the data have any."""

    type: Literal["label"] = "label"
    """Condition on the class of the image, or no condition."""

    @property
    def reads(self) -> str | None:
        """Return the kind of the shards next to the images: none."""
        return None

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        _check_no_embeddings(section, settings)

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
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, source: Shards | Sequence[Path] = ()
    ) -> SamplingRequest:
        """Return the conditions of `count` images, beside classes: nothing."""
        return SamplingRequest()


class TextCondition(Config):
    """Captions, which the stage `embed` has encoded (section pairs)."""

    type: Literal["text"] = "text"
    """Words of an image's caption."""
    caption_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """Frequencies of drawing the first, second, … caption of an image, as shares of any sum; unset: each as often."""

    @field_validator("caption_weights")
    @classmethod
    def _draw_something(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and not sum(value) > 0:
            raise ValueError(f"{list(value)} would draw no caption. Give one of them a weight above 0.")
        return value

    @property
    def reads(self) -> str | None:
        """Return the kind of the shards beside the images."""
        return "captions"

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError without prompts."""
        if settings.prompts is None:
            raise ValueError(
                f"{section}.prompts is missing: the network takes words. Write some, such as {section}: {{prompts: "
                f"[a photo of a dog]}}, or name a file of them."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes words. Name classes in the prompts.")
        _check_no_embeddings(section, settings)
        if isinstance(settings.prompts, tuple):
            read_prompts(settings.prompts, f"{section}.prompts")

    def check_pairs(self, pairs: Any) -> None:
        """Raise ValueError where the captions of the section pairs do not fit."""
        self.check_captions(pairs.num_captions)

    def check_captions(self, count: int) -> None:
        """Raise ValueError if the number of caption weights differs from the number of captions."""
        if self.caption_weights is not None and len(self.caption_weights) != count:
            raise ValueError(
                f"system.condition.caption_weights has {len(self.caption_weights)} numbers, but pairs.num_captions is "
                f"{count}. Give both the same number, or leave the weights out."
            )

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the shapes that a network has to be built for: no classes, captions of [1 + L, dim]."""
        assert pairs is not None
        self.check_captions(pairs.shape[0])
        return spec.model_copy(update={"num_classes": 0, "conditions": {TEXT: tuple(pairs.shape[1:])}})

    def training_conditions(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Return one of the captions of each image [B, captions, 1 + L, dim], drawn anew in every epoch."""
        has = stored[:, :, 0].any(dim=2)  # [B, K]
        weights = torch.ones_like(has, dtype=torch.float32)
        if self.caption_weights is not None:
            weights = weights * torch.tensor(self.caption_weights, device=has.device)
        weights = weights * has
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, has.float())  # its captions have no weight
        ends = weights.cumsum(1)
        drawn = streams.uniform("caption")[:, None] * ends[:, -1:]  # [B, 1]
        chosen = (drawn >= ends).sum(1).clamp(max=stored.shape[1] - 1)
        return {TEXT: stored[torch.arange(len(stored), device=stored.device), chosen].float()}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the embeddings that images are made of: none."""
        return None

    def sampling_request(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, source: Shards | Sequence[Path] = ()
    ) -> SamplingRequest:
        """Return the encoded prompts of `count` images. pairs: the description of the captions in their manifest."""
        if pairs is None:
            raise ValueError("The model does not say which text encoder it was trained with. Train it again.")
        self.check("sample", settings)
        assert settings.prompts is not None
        prompts = read_prompts(settings.prompts, "sample.prompts")[:count]
        encoder = encoder_of(pairs, best_device())
        encoded = encode_captions(encoder, [*prompts, settings.negative_prompt])
        null = {TEXT: encoded[-1]} if settings.negative_prompt else {}
        return SamplingRequest([prompts[i % len(prompts)] for i in range(count)], {TEXT: encoded[:-1]}, null)


class EmbeddingCondition(Config):
    """Condition on image embeddings, which the stage `embed` computes (section pairs). The network is a decoder like
    unCLIP's (Ramesh et al. 2022, section 2.1), which turns the embeddings that a prior predicts into images."""

    type: Literal["embedding"] = "embedding"
    """An image's embedding."""

    @property
    def reads(self) -> str | None:
        """Return the kind of the shards beside the images."""
        return "pairs"

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes embeddings, not "
                f"words. Write prompts for a prior, and name that: {section}: {{embeddings: {{experiment: NAME}}}}."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes embeddings. Leave it out.")

    def check_pairs(self, pairs: Any) -> None:
        """Accept any section pairs: pairs of embeddings are all that it needs."""

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the shapes that a network has to be built for: no classes, embeddings of [dim]."""
        assert pairs is not None
        return spec.model_copy(update={"num_classes": 0, "conditions": {EMBEDDING: tuple(pairs.shape[-1:])}})

    def training_conditions(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Return the image embedding of each image's pair [B, 2 + L, dim]."""
        return {EMBEDDING: stored[:, IMAGE].float()}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the embeddings to sample from: the configured one, or held-out images."""
        return settings.embeddings or "validation"

    def sampling_request(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, source: Shards | Sequence[Path] = ()
    ) -> SamplingRequest:
        """Return the embeddings of `count` images, chosen by their seeds. source: held-out images with their pairs, the
        folders of those, or a folder of embeddings."""
        seeds = torch.arange(settings.first_seed, settings.first_seed + count)
        if isinstance(source, Shards):
            return of_held_out(source, seeds)
        if settings.embeddings is None:
            return of_held_out(held_out(source), seeds)
        if isinstance(settings.embeddings, str):
            source = source or [Path(settings.embeddings)]
        if len(source) != 1:
            raise ValueError(
                "sample.embeddings names another experiment. Name the folder of its samples: --embeddings."
            )
        return of_folder(source[0], pairs, seeds)


def _check_no_embeddings(section: str, settings: SampleConfig) -> None:
    """Raise ValueError if embeddings are set that no image would use."""
    if settings.embeddings is not None:
        raise ValueError(
            f"{section}.embeddings is set, but the network takes no embeddings. Leave it out, or set "
            f"system.condition.type to embedding."
        )


Condition = Annotated[LabelCondition | TextCondition | EmbeddingCondition, Field(discriminator="type")]
