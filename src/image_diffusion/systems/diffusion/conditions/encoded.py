"""Conditions that the stage `embed` has encoded: the caption of an image, or the embedding of an image. Sampling uses
encoded prompts; embeddings of held-out images, or those that a prior has sampled from captions (unCLIP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.core.devices import best_device, to_device
from image_diffusion.core.files.atomic import read_json, sha256_file
from image_diffusion.core.files.checksums import check_files
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.encoded.pairs import IMAGE
from image_diffusion.data.shards.reader import Shards
from image_diffusion.data.sources.embeddings import Embeddings, Part, open_rows
from image_diffusion.systems.diffusion.conditions.base import (
    EXAMPLE_PROMPTS,
    ConditionInputs,
    ConditionPart,
    SamplingRequest,
    ServedModel,
    held_out,
    read_prompts,
    rows_of,
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


_DESCRIBED = "embeddings.json"


class EmbeddingCondition(ConditionPart):
    """Condition on image embeddings, which the stage `embed` computes (section pairs). The network is a decoder like
    unCLIP's (Ramesh et al. 2022, section 2.1), which turns the embeddings that a prior predicts into images."""

    type: Literal["embedding"] = "embedding"
    """An embedding of the image."""

    keys: ClassVar[frozenset[str]] = frozenset({"embeddings"})
    reads: ClassVar[str] = "pairs"
    pairs_example: ClassVar[str] = "{type: hashed}"
    source_key: ClassVar[str] = "embeddings"
    source_advice: ClassVar[str] = "name a prior: {experiment: NAME}"

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes embeddings, not "
                f"words. Write prompts for a prior, and name that: {section}: {{embeddings: {{experiment: NAME}}}}."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes embeddings. Leave it out.")
        super().check(section, settings, pairs)

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network: no classes, embeddings of [dim]."""
        assert pairs is not None
        return spec.model_copy(update={"num_classes": 0, "conditions": {EMBEDDING: tuple(pairs.shape[-1:])}})

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the image embeddings of pairs [B, 2 + L, dim]."""
        return {EMBEDDING: stored[:, IMAGE].float()}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the embeddings to sample from: the configured one, or held-out images."""
        return settings.embeddings or "validation"

    def served(self, model: ServedModel) -> dict[str, Column] | None:
        """Return the column of prompts, if the model that makes embeddings of them is served, too."""
        return {"prompt": Column("string", required=True, example=EXAMPLE_PROMPTS)} if model.embeds else None

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the embeddings of the samples, chosen by their seeds. Their source: held-out images with their pairs,
        the folders of both, a folder of embeddings, or a model that makes them from the prompts of a request."""
        settings, source, seeds = inputs.settings, inputs.source, inputs.seeds
        if inputs.rows is not None and inputs.embed is not None:
            prompts = [str(row["prompt"]) for row in inputs.rows]
            return SamplingRequest(conditions={EMBEDDING: inputs.embed(prompts, seeds).float()})
        if isinstance(source, Shards) or settings.embeddings is None:
            return of_held_out(held_out(source), seeds)
        if isinstance(settings.embeddings, str):
            source = source or [Path(settings.embeddings)]
        if len(source) != 1:
            raise ValueError(
                "sample.embeddings names another experiment. Name the folder of its samples: --embeddings."
            )
        return of_folder(source[0], inputs.pairs, seeds)


def of_held_out(images: Shards, seeds: Tensor) -> SamplingRequest:
    """Return the embeddings of held-out images for some seeds, int64 [N]."""
    rows, labels, origin = rows_of(images, seeds)
    image = images.gather_of("pairs", rows)[:, IMAGE].float()
    return SamplingRequest(conditions={EMBEDDING: image}, labels=labels, described={"embeddings": origin})


def of_folder(folder: Path, pairs: Mapping[str, Any] | None, seeds: Tensor) -> SamplingRequest:
    """Read embeddings written by a prior's `sample` or by clip-retrieval, for seeds int64 [N]: seed s uses row s modulo
    their number, and its caption.

    pairs: the manifest's description of the pairs that the network was trained on. Raises ValueError for files that
    cannot be read or are damaged, and for embeddings by another encoder.
    """
    source, described = Embeddings(path=str(folder), texts=None), folder / _DESCRIBED
    origin: dict[str, Any] = {}
    if described.is_file():
        origin = {"sha256": sha256_file(described)}
        said = read_json(described)
        check_files(folder, said["files"], "Run the stage that writes it again.")
        prior_encoder, own_encoder = (_encoder(described_pairs) for described_pairs in (said["pairs"], pairs))
        if None not in (prior_encoder, own_encoder) and prior_encoder != own_encoder:
            raise ValueError(
                f"sample.embeddings: the prior of {folder} predicts embeddings of {prior_encoder}, but the network "
                f"was trained on those of {own_encoder}. Train both on the same pairs."
            )
    try:
        parts = source.parts()
        embeddings, captions = _rows(source, parts, (seeds % sum(part.num_rows for part in parts)).numpy())
    except ValueError as error:
        raise ValueError(f"sample.embeddings: {str(error).removeprefix('data.source.path: ')}") from None
    sources: dict[str, Any] = {"prompts": captions} | ({"embeddings": origin} if origin else {})
    return SamplingRequest(captions, {EMBEDDING: embeddings}, described=sources)


def _encoder(pairs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the encoder that embedded the images of pairs, without the number of caption tokens; None if it is not
    recorded."""
    encoder = {name: value for name, value in (pairs or {}).get("image", {}).items() if name != "num_tokens"}
    return encoder if encoder.get("type", "files") != "files" else None


def _rows(source: Embeddings, parts: Sequence[Part], numbers: np.ndarray[Any, Any]) -> tuple[Tensor, list[str]]:
    """Return rows by number, over all parts: float32 [N, dim], and their captions."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    embeddings, captions = torch.zeros(len(numbers), parts[0].dim), [""] * len(numbers)
    for part, start, stop in zip(parts, starts[:-1], starts[1:], strict=True):
        inside = np.flatnonzero((numbers >= start) & (numbers < stop))
        embeddings[inside] = torch.from_numpy(
            np.asarray(open_rows(part.image)[numbers[inside] - start], dtype=np.float32)
        )
        texts = source.captions(part)
        for row in inside:
            captions[row] = texts[numbers[row] - start]
    return embeddings, captions
