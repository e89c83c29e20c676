"""What a diffusion is told of an image: its class, words, or its embedding. What it reads beside the images, and what
is asked of it.

A condition answers for itself: which shards lie beside the images, what a network has to be built for, what it is told
of stored samples, and what it is told for the images that a person asks for. Another condition is another class here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.codecs.text.encoder import encode_captions
from image_diffusion.codecs.text.known import encoder_of
from image_diffusion.core.config import Config
from image_diffusion.core.devices import best_device
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec, SamplesOf
from image_diffusion.data.pairs import IMAGE
from image_diffusion.data.shards import Shards
from image_diffusion.systems.diffusion.asked import Asked
from image_diffusion.systems.diffusion.embedded import held_out, of_folder, of_held_out
from image_diffusion.systems.diffusion.prompts import read_prompts
from image_diffusion.systems.diffusion.sampling import SampleConfig


class LabelCondition(Config):
    """The class of an image, where the data have any."""

    type: Literal["label"] = "label"
    """The class of an image, or nothing."""

    @property
    def reads(self) -> str | None:
        """The kind of the shards beside the images; none."""
        return None

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network is told classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        _check_no_embeddings(section, settings)

    def check_pairs(self, pairs: Any) -> None:
        """There are none."""

    def spec(self, spec: DataSpec, beside: Shards | None) -> DataSpec:
        """What a network has to be built for."""
        return spec

    def told(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """What the network is told of stored samples, beside the class: nothing."""
        return {}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Of which embeddings images are made: of none."""
        return None

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """What `count` images are asked for with, beside classes: nothing."""
        return Asked()


class TextCondition(Config):
    """Captions, which the stage `embed` has encoded (section pairs)."""

    type: Literal["text"] = "text"
    """Words: an image's caption."""
    caption_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """How often the first, second, … caption of an image is drawn, as shares of any sum; unset: each as often."""

    @field_validator("caption_weights")
    @classmethod
    def _draw_something(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and not sum(value) > 0:
            raise ValueError(f"{list(value)} would draw no caption. Give one of them a weight above 0.")
        return value

    @property
    def reads(self) -> str | None:
        """The kind of the shards beside the images."""
        return "captions"

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError without prompts."""
        if settings.prompts is None:
            raise ValueError(
                f"{section}.prompts is missing: the network is told words. Write some, such as {section}: {{prompts: "
                f"[a photo of a dog]}}, or name a file of them."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network is told words. Name classes in the prompts.")
        _check_no_embeddings(section, settings)
        if isinstance(settings.prompts, tuple):
            read_prompts(settings.prompts, f"{section}.prompts")

    def check_pairs(self, pairs: Any) -> None:
        """Raise ValueError where the captions of the section pairs do not fit."""
        self.check_captions(pairs.num_captions)

    def check_captions(self, count: int) -> None:
        """Raise ValueError unless there is a weight for each of so many captions, where there are weights."""
        if self.caption_weights is not None and len(self.caption_weights) != count:
            raise ValueError(
                f"system.condition.caption_weights has {len(self.caption_weights)} numbers, but pairs.num_captions is "
                f"{count}. Give both the same number, or leave the weights out."
            )

    def spec(self, spec: DataSpec, beside: Shards | None) -> DataSpec:
        """What a network has to be built for: no classes, captions of [1 + L, dim]."""
        assert beside is not None
        self.check_captions(beside.shape[0])
        return spec.model_copy(update={"num_classes": 0, "conditions": {TEXT: tuple(beside.shape[1:])}})

    def told(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Of each image [B, captions, 1 + L, dim] one of the captions that it has, drawn anew in every epoch."""
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
        """Of which embeddings images are made: of none."""
        return None

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """The prompts of `count` images, encoded. pairs: what the manifest of the captions says of them."""
        if pairs is None:
            raise ValueError("The model does not say which text encoder it was trained with. Train it again.")
        self.check("sample", settings)
        assert settings.prompts is not None
        prompts = read_prompts(settings.prompts, "sample.prompts")[:count]
        encoder = encoder_of(pairs, best_device())
        encoded = encode_captions(encoder, [*prompts, settings.negative_prompt])
        null = {TEXT: encoded[-1]} if settings.negative_prompt else {}
        return Asked([prompts[i % len(prompts)] for i in range(count)], {TEXT: encoded[:-1]}, null)


class EmbeddingCondition(Config):
    """Embeddings of the images, which the stage `embed` has computed (section pairs): a decoder as unCLIP's (Ramesh et
    al. 2022, section 2.1), which draws what a prior predicts."""

    type: Literal["embedding"] = "embedding"
    """An image's embedding."""

    @property
    def reads(self) -> str | None:
        """The kind of the shards beside the images."""
        return "pairs"

    def check(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError for settings that do nothing."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network is told embeddings, not "
                f"words. Write prompts for a prior, and name that: {section}: {{embeddings: {{experiment: NAME}}}}."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network is told embeddings. Leave it out.")

    def check_pairs(self, pairs: Any) -> None:
        """Pairs of embeddings are all that is asked of the section pairs."""

    def spec(self, spec: DataSpec, beside: Shards | None) -> DataSpec:
        """What a network has to be built for: no classes, embeddings of [dim]."""
        assert beside is not None
        return spec.model_copy(update={"num_classes": 0, "conditions": {EMBEDDING: tuple(beside.shape[-1:])}})

    def told(self, stored: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Of each image's pair [B, 2 + L, dim] the image's embedding."""
        return {EMBEDDING: stored[:, IMAGE].float()}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Of which embeddings images are made: those that are named, or those of held-out images."""
        return settings.embeddings or "validation"

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """The embeddings that `count` images are made of, each by its seed. given: held-out images with their pairs,
        the folders of those, or a folder of embeddings."""
        seeds = torch.arange(settings.first_seed, settings.first_seed + count)
        if isinstance(given, Shards):
            return of_held_out(given, seeds)
        if settings.embeddings is None:
            return of_held_out(held_out(given), seeds)
        if isinstance(settings.embeddings, str):
            given = given or [Path(settings.embeddings)]
        if len(given) != 1:
            raise ValueError(
                "sample.embeddings names another experiment. Name the folder of its samples: --embeddings."
            )
        return of_folder(given[0], pairs, seeds)


def _check_no_embeddings(section: str, settings: SampleConfig) -> None:
    """Raise ValueError where embeddings are named that nothing is made of."""
    if settings.embeddings is not None:
        raise ValueError(
            f"{section}.embeddings is set, but the network is told no embeddings. Leave it out, or set "
            f"system.condition.type to embedding."
        )


Condition = Annotated[LabelCondition | TextCondition | EmbeddingCondition, Field(discriminator="type")]
