"""Prior: a caption's embedding -> an image's embedding (Ramesh et al. 2022, section 2.2).

Defaults that differ from those of lucidrains/DALLE2-pytorch (docs/systems.md has all):

    key                                      original  here  why
    system.objective.text_drop_probability   0         0.1   needed for guidance; DALL-E 2, section 2.2
    system.objective.image_drop_probability  0         0.1   as above
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.shards.reader import Shards
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.networks.prior_transformer import PriorTransformerConfig
from image_diffusion.objectives.embedding import EmbeddingDenoising, EmbeddingObjective
from image_diffusion.process.discrete import Cosine, Discrete
from image_diffusion.systems.base import Others, Sections, System
from image_diffusion.systems.interface import Section
from image_diffusion.systems.pairs.config import EmbeddingPairs, FilePairs
from image_diffusion.systems.prior.evaluation import PredictionConfig, PriorEvaluation
from image_diffusion.systems.prior.generation import PriorSampleConfig, PriorSampling, check_sample
from image_diffusion.systems.prior.generator import EmbeddingReading, ImageStatistics, Scaling, pair_batch
from image_diffusion.systems.warm_start import WarmStart


class PriorSystem(System):
    """A causal transformer that removes noise from image embeddings."""

    type: Literal["prior"] = "prior"
    """A diffusion prior of embeddings."""
    network: Annotated[PriorConfig | PriorTransformerConfig, Field(discriminator="type")] = PriorConfig()
    """Network and its size."""
    process: Discrete = Discrete(schedule=Cosine())
    """Noise process."""
    objective: EmbeddingDenoising = EmbeddingDenoising()
    """Prediction of the network, and the weighting of its error."""
    image_scale: float | None = Field(None, gt=0)
    """Factor by which image embeddings are multiplied; unset: the square root of their dimension, which suits
    embeddings of norm 1."""
    image_statistics: ImageStatistics | None = None
    """Statistics that normalise image embeddings in place of image_scale, as in Karlo and Kandinsky; unset:
    image_scale."""
    token_encodings: bool = True
    """Condition the network on the encodings of the caption's tokens as well, if the pairs contain them."""

    sections: ClassVar[Mapping[str, Section]] = {
        "pairs": Section(EmbeddingPairs, None, example="{type: hashed}"),
        "prediction": Section(PredictionConfig, PredictionConfig()),
        "sample": Section(PriorSampleConfig, None, example="{prompts: [a photo of a dog]}", optional=True),
    }
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": {"type": "adamw", "lr": 1.1e-4, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 6.02e-2},
        "grad_clip": 0.5,
        "ema": {
            "type": "exponential",
            "rates": (0.99,),
            "update_every": 10,
            "warmup": {"type": "inverse_power", "update_after_step": 100},
        },
        "flip_probability": 0.0,
        "grid_every_steps": None,
    }
    reads: ClassVar = ("pairs",)
    warm_start: ClassVar = WarmStart(scaled_by=("image_scale", "image_statistics"))

    @model_validator(mode="after")
    def _scaled_once(self) -> PriorSystem:
        if self.image_scale is not None and self.image_statistics is not None:
            raise ValueError("image_scale and image_statistics are both set. Leave out one of the two.")
        return self

    @model_validator(mode="after")
    def _table_fits(self) -> PriorSystem:
        rows, timesteps = self.network.num_timesteps, self.process.num_timesteps
        if rows is not None and rows != timesteps:
            raise ValueError(
                f"network.num_timesteps is {rows} but process.num_timesteps {timesteps}: the network has a row for "
                f"each timestep. Give both the same number, or leave network.num_timesteps unset."
            )
        return self

    def check(self, experiment: Sections, others: Others) -> None:
        pairs, room = experiment.section("pairs"), self.network.max_text_len
        if isinstance(pairs, FilePairs) != isinstance(experiment.data.source, Embeddings):
            raise ValueError(
                f"pairs.type is {pairs.type} but data.source.type {experiment.data.source.type}. Use type files "
                f"with source embeddings; all other pairs are computed from images."
            )
        if self.token_encodings and pairs.num_tokens > room:
            raise ValueError(
                f"pairs.num_tokens is {pairs.num_tokens}, but the network has places for {room}: the rest would be cut "
                f"off. Set system.network.max_text_len to {pairs.num_tokens}, or store fewer."
            )
        self._check_self_conditioning()
        prediction, sample = experiment.section("prediction"), experiment.section("sample")
        prediction.checked(self.process, self.objective.drops_conditions)
        if sample is not None:
            check_sample(sample, self.process, self.objective.drops_conditions)
            if sample.clip is not None and not isinstance(pairs, FilePairs):
                raise ValueError(
                    f"sample.clip is set, but pairs.type is {pairs.type}, whose encoder of captions embeds the "
                    f"prompts. Leave it out."
                )
        if isinstance(pairs, FilePairs) and self.image_scale is not None:
            self._check_clamps({"system.objective": self.objective, "prediction": prediction, "sample": sample})

    def _check_self_conditioning(self) -> None:
        """Raise ValueError for a share of estimates that the network does not take."""
        share = self.objective.self_conditioning_probability
        usual = type(self.objective).model_fields["self_conditioning_probability"].default
        if not self.network.self_cond and share not in (0, usual):
            raise ValueError(
                f"system.objective.self_conditioning_probability is {share:g}, but system.network.self_cond is false: "
                f"the network takes no estimate. Leave it out, or take a network with self_cond: true."
            )

    def _check_clamps(self, sections: Mapping[str, Config | None]) -> None:
        """Raise ValueError if a section clamps the norm of embeddings that need not have norm 1."""
        for section, settings in sections.items():
            for name, value in {} if settings is None else dict(settings).items():
                if name.startswith("clamp_") and value:
                    raise ValueError(
                        f"{section}.{name} is true and system.image_scale {self.image_scale:g}, but the embeddings of "
                        f"files need not have the norm 1 that it takes them to have. Set it to false; or leave out "
                        f"system.image_scale, where theirs is 1."
                    )

    def spec(self, data: Shards) -> DataSpec:
        """Return the shapes that the data fix: pairs are [2 + L, dim]."""
        return DataSpec(channels=data.shape[-1], resolution=1)

    def scale(self, spec: DataSpec) -> float:
        """Return the factor by which image embeddings are multiplied."""
        return self.image_scale or math.sqrt(spec.channels)

    def build_network(self, spec: DataSpec) -> nn.Module:
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> EmbeddingObjective:
        return self.objective.build(self.process.build(), self.scale(spec), self.network.self_cond)

    def batch(
        self,
        stored: Tensor,
        label: Tensor,
        streams: Streams,
        spec: DataSpec,
        codec: Codec,
        joined_sets: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        return pair_batch(stored, streams, Scaling(self.scale(spec), self.image_statistics), self.token_encodings)

    def reading(self, spec: DataSpec) -> EmbeddingReading:
        """Return the properties of the system that sampling depends on."""
        return EmbeddingReading(
            process=self.process,
            prediction=self.objective.prediction,
            drops_conditions=self.objective.drops_conditions,
            self_cond=self.network.self_cond,
            norm=self.scale(spec),
            statistics=self.image_statistics,
        )

    def sampling(self) -> PriorSampling:
        return PriorSampling(self.process, self.reading, self.token_encodings)

    def evaluation(self) -> PriorEvaluation:
        return PriorEvaluation(self.reading, self.build_objective, self.token_encodings)
