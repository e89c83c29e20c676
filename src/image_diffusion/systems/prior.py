"""The prior: a caption's embedding -> an image's embedding (Ramesh et al. 2022, section 2.2).

Defaults that differ from those of lucidrains/DALLE2-pytorch (docs/systems.md has all):

    key                                      original  here  why
    system.objective.text_drop_probability   0         0.1   guidance needs it; DALL-E 2's paper drops, section 2.2
    system.objective.image_drop_probability  0         0.1   as above
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Network
from image_diffusion.data.pairs import IMAGE, TEXT, TOKENS
from image_diffusion.data.shards import Shards
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.networks.prior_transformer import PriorTransformerConfig
from image_diffusion.objectives.embedding import EmbeddingDenoising, EmbeddingObjective
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.process.schedules import Cosine
from image_diffusion.systems.embedding.evaluation import PredictionConfig, judge_prior
from image_diffusion.systems.embedding.hub_export import write_prior
from image_diffusion.systems.embedding.making import (
    CaptionEmbedder,
    EmbeddingFiles,
    PriorSampleConfig,
    check_sample,
    make_embeddings,
)
from image_diffusion.systems.embedding.pairs import EmbeddingPairs, FilePairs
from image_diffusion.systems.embedding.prior_folder import check_diffusers, folder_of, read_folder, write_folder
from image_diffusion.systems.embedding.published import check_fit, entry_of, is_prior, named_tensors, published, spec_of
from image_diffusion.systems.embedding.reading import EmbeddingReading, ImageStatistics, Scaling
from image_diffusion.systems.given import (
    CardUse,
    Described,
    Embed,
    Foreign,
    Maker,
    Model,
    Others,
    SampleFiles,
    Section,
    Sections,
    ToJudge,
    ToSample,
)
from image_diffusion.systems.system import System


class PriorSystem(System):
    """A causal transformer that removes noise from image embeddings."""

    type: Literal["prior"] = "prior"
    """A diffusion prior of embeddings."""
    network: Annotated[PriorConfig | PriorTransformerConfig, Field(discriminator="type")] = PriorConfig()
    """The network and its size."""
    process: Discrete = Discrete(schedule=Cosine())
    """How noise is added."""
    objective: EmbeddingDenoising = EmbeddingDenoising()
    """What the network predicts, and how its error is weighed."""
    image_scale: float | None = Field(None, gt=0)
    """What image embeddings are multiplied with; unset: the root of their dimension, right for those of norm 1."""
    image_statistics: ImageStatistics | None = None
    """What image embeddings are normalised by in place of a scale, as Karlo and Kandinsky do; unset: image_scale."""
    token_encodings: bool = True
    """Condition on the encodings of a caption's tokens too, where the pairs hold them."""

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
    exports: ClassVar[tuple[str, ...]] = ("diffusers", "pipeline")
    reads: ClassVar = ("pairs",)
    mirrors: ClassVar = False
    scaled_by: ClassVar = ("image_scale", "image_statistics")
    judged_by: ClassVar = ("prediction",)
    samples: ClassVar[SampleFiles] = EmbeddingFiles()

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
                f"pairs.type is {pairs.type} but data.source.type {experiment.data.source.type}. Files of embeddings "
                f"take type files and source embeddings; all other pairs are made from images."
            )
        if self.token_encodings and pairs.num_tokens > room:
            raise ValueError(
                f"pairs.num_tokens is {pairs.num_tokens}, but the network has places for {room}: the rest would be cut "
                f"off. Set system.network.max_text_len to {pairs.num_tokens}, or store fewer."
            )
        experiment.section("prediction").check(self)
        if (sample := experiment.section("sample")) is not None:
            check_sample(self, sample)
        if experiment.section("export").format == "diffusers":
            check_diffusers(self)

    def headline(self, experiment: Sections) -> str:
        return "loss_validation"

    def spec(self, data: Shards) -> DataSpec:
        """Pairs are [2 + L, dim]."""
        return DataSpec(channels=data.shape[-1], resolution=1)

    def scale(self, spec: DataSpec) -> float:
        """What image embeddings are multiplied with."""
        return self.image_scale or math.sqrt(spec.channels)

    def stored(self, x: Tensor, spec: DataSpec) -> Tensor:
        """Image embeddings as they are stored, of x [..., dim]."""
        return self.scaling(spec).stored(x)

    def scaling(self, spec: DataSpec) -> Scaling:
        """How image embeddings become x, and back."""
        return Scaling(self.scale(spec), self.image_statistics)

    def build_network(self, spec: DataSpec) -> nn.Module:
        """The network, randomly initialised."""
        network: nn.Module = self.network.build(spec)
        return network

    def build_objective(self, spec: DataSpec) -> EmbeddingObjective:
        """The objective for embeddings of `spec`."""
        return self.objective.build(self.process.build(), self.scale(spec), self.network.self_cond)

    def batch(self, stored: Tensor, label: Tensor, streams: Streams, spec: DataSpec, codec: Codec) -> Batch:
        return self.pair_batch(stored, streams)

    def pair_batch(self, pairs: Tensor, streams: Streams) -> Batch:
        """What the objective is given of stored pairs [B, 2 + L, dim]. Raises ValueError for another shape."""
        if pairs.ndim != 3 or pairs.shape[1] < TOKENS:
            raise ValueError(
                f"The prior learns from pairs of embeddings, [B, 2 or more, dim], but the data set holds "
                f"{list(pairs.shape[1:])}. Train on what embed wrote."
            )
        scaling = self.scaling(DataSpec(channels=pairs.shape[2], resolution=1))
        return Batch(scaling.x(pairs[:, IMAGE].float()), self.caption(pairs), streams)

    def caption(self, pairs: Tensor) -> dict[str, Tensor]:
        """What the network is told of stored pairs [B, 2 + L, dim]: "text_embed" and, where it is, "text_encodings"."""
        cond = {"text_embed": pairs[:, TEXT].float()}
        if self.token_encodings and pairs.shape[1] > TOKENS:
            cond["text_encodings"] = pairs[:, TOKENS:].float()
        return cond

    @property
    def learns_nulls(self) -> bool:
        """Whether the network also learns to do without its conditions, which guidance needs."""
        return self.objective.learns_nulls

    def reading(self, norm: float) -> EmbeddingReading:
        """What sampling has to know of it. norm: what image embeddings are multiplied with."""
        return EmbeddingReading(
            process=self.process,
            prediction=self.objective.prediction,
            learns_nulls=self.learns_nulls,
            self_cond=self.network.self_cond,
            norm=norm,
            statistics=self.image_statistics,
        )

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch. guide: a network -> the guided one. restrict: what
        is done to each predicted x0, from which eps then follows."""
        return self.reading(1.0).denoiser(network, grid, cond, guide, restrict)

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ == "diffusers":
            return write_folder(self, model, folder)
        return write_prior(self, model, folder)

    def maker(self, given: ToSample) -> Maker:
        return make_embeddings(self, given)

    def evaluations(self, settings: PriorSampleConfig) -> int:
        calls: int = settings.sampler.calls(settings.sampler.grid(self.process))
        return calls * settings.num_candidates * (1 + (settings.guidance_scale != 1))

    def embedder(self, model: Model, settings: PriorSampleConfig) -> Embed:
        return CaptionEmbedder(self, model, settings)

    def judge(self, given: ToJudge) -> dict[str, Any]:
        return judge_prior(self, given)

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        """A prior of DALLE2-pytorch, of a published name or as an experiment describes it; or diffusers' own."""
        if path.is_dir() and (folder := folder_of(path)) is not None:
            weights, parts, spec, told = read_folder(folder, described(cls))
            return Foreign(weights, cls(**parts), spec, Rgb(), Rgb().identity, told)
        if not is_prior(content):
            return None
        tensors, experiment = named_tensors(content), described(cls)
        if experiment is None:
            system = cls(**published(tensors, path))
        else:
            assert isinstance(experiment.system, cls)
            system = experiment.system
        spec = spec_of(tensors)
        with torch.device("meta"):
            expected = system.build_network(spec).state_dict()
        check_fit(expected, tensors, path)
        unread = tuple(name for name in content if name != average) if (average := entry_of(content)) else ()
        told = "a prior" if average is None else f"a prior, its entry {average}"
        weights = {name: each.float() for name, each in tensors.items()}
        return Foreign(weights, system, spec, Rgb(), Rgb().identity, told, unread)
