"""Condition on the embedding of an image, which the stage `embed` has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import EMBEDDING, DataSpec, SamplesOf
from image_diffusion.data.encoded.pairs import IMAGE
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import ConditionInputs, ConditionPart, ServedModel
from image_diffusion.systems.diffusion.conditions.image_embeddings import held_out, of_folder, of_held_out
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.prompts import EXAMPLE_PROMPTS
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest
from image_diffusion.systems.sampling import Column


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
