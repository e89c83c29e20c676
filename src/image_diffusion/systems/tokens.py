"""Tokens: a transformer over the tokens of a discrete VAE, the second half of DALL-E (Ramesh et al. 2021).

By default it is MaskGIT's, which fills in many tokens at once (Chang et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.tokens import TokensOf
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Objective
from image_diffusion.data.encoding import EncodeConfig
from image_diffusion.data.shards import Shards
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.networks.token_transformer import TokenTransformer, TokenTransformerConfig
from image_diffusion.nn.precision import Precision
from image_diffusion.objectives import TokenObjective
from image_diffusion.objectives.masked_tokens import MaskedTokens
from image_diffusion.systems.diffusion.asked import Asked
from image_diffusion.systems.diffusion.checks import check_kept
from image_diffusion.systems.diffusion.conditions import LabelCondition, TextCondition
from image_diffusion.systems.diffusion.hub_export import write_images
from image_diffusion.systems.diffusion.making import Generates, Images, image_columns, make_images, preview_images
from image_diffusion.systems.diffusion.prompts import check_judged
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.embedding.captions import CaptionPairs
from image_diffusion.systems.given import (
    CardUse,
    Embed,
    Inputs,
    Maker,
    Model,
    Others,
    Predict,
    Preview,
    Section,
    Sections,
    Served,
    ToJudge,
    ToPreview,
    ToSample,
    all_but,
)
from image_diffusion.systems.system import System, spec_of
from image_diffusion.systems.token.evaluation import judge_tokens
from image_diffusion.systems.token.exported import ExportedTokenModel
from image_diffusion.systems.token.sampling import (
    KEYS,
    TokenGenerator,
    TokenReading,
    TokenSampleConfig,
    check_settings,
    fitted,
)
from image_diffusion.systems.token.sweep import KEYS as SWEPT
from image_diffusion.systems.token.sweep import TokenSweepConfig, check_sweep


class TokensSystem(System):
    """A transformer over tokens."""

    type: Literal["tokens"] = "tokens"
    """A transformer over the tokens of a discrete codec."""
    network: TokenTransformerConfig = TokenTransformerConfig()
    """Size of the network."""
    objective: TokenObjective = MaskedTokens()
    """What is told from what: hidden tokens from all others, or each from those before it."""
    condition: Annotated[LabelCondition | TextCondition, Field(discriminator="type")] = LabelCondition()
    """What the network is told of an image, before its tokens: its class, or words."""

    sections: ClassVar[Mapping[str, Section]] = {
        "codec": Section(TokensOf, None, example="{type: tokens, of: {type: trained, experiment: my_dvae}}"),
        "encode": Section(EncodeConfig, EncodeConfig(), all_but(EncodeConfig, "tokens")),
        "pairs": Section(CaptionPairs, None, example="{type: captions}", optional=True),
        "preview": Section(TokenSampleConfig, TokenSampleConfig(), KEYS - {"keep"}),
        "sample": Section(TokenSampleConfig, TokenSampleConfig(), KEYS),
        "sweep": Section(TokenSweepConfig, TokenSweepConfig(), SWEPT),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), all_but(EvaluateConfig, "lpips", "likelihood")),
    }
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": {"type": "adamw", "lr": 1e-4, "betas": (0.9, 0.96), "weight_decay": 0.0},
    }
    reads: ClassVar = ("tokens",)
    judged_on_encoded: ClassVar = True
    exports: ClassVar[tuple[str, ...]] = ("pipeline",)
    class_rows: ClassVar[tuple[str, ...]] = ("y_embedder.embedding_table.weight",)
    positions: ClassVar[tuple[str, ...]] = ("pos_embed",)

    @property
    def reads_beside(self) -> str | None:
        return self.condition.reads

    @property
    def told_words(self) -> bool:
        """Whether its network is told words, in place of classes."""
        return self.condition.reads is not None

    @property
    def drops_labels(self) -> bool:
        """Whether the network also learns to do without a label, which guidance needs."""
        return self.objective.label_drop_probability > 0

    @property
    def reading(self) -> TokenReading:
        """What sampling has to know of it."""
        return TokenReading(causal=self.objective.causal, drops_labels=self.drops_labels)

    @property
    def low_resolution(self) -> None:
        """It enlarges nothing."""
        return

    def check(self, experiment: Sections, others: Others) -> None:
        pairs = experiment.section("pairs")
        if self.told_words != (pairs is not None):
            raise ValueError(
                "system.condition.type is text, but pairs is missing: where are the captions? Add a section, such as "
                "pairs: {type: captions}."
                if self.told_words
                else "pairs is set, but system.condition.type is label: nothing reads it. Leave it out, or set the "
                "condition to text."
            )
        self.condition.check_pairs(pairs)
        check_judged(experiment)
        check_kept(experiment, others)
        super().check(experiment, others)
        spec = spec_of(experiment, others.codec)
        check_settings("sample", self, experiment, spec)
        check_sweep(self, experiment, spec)
        if experiment.train.grid_every_steps is not None:
            check_settings("preview", self, experiment, spec)

    def inputs(self, experiment: Sections) -> Inputs:
        return Inputs(against=experiment.section("evaluate").against)

    def headline(self, experiment: Sections) -> str:
        return str(experiment.section("evaluate").detectors[0].metric_name("fd"))

    def detectors(self, experiment: Sections) -> Sequence[DetectorConfig]:
        found: Sequence[DetectorConfig] = experiment.section("evaluate").detectors
        return found

    def looks_at_splits(self, experiment: Sections) -> bool:
        return experiment.section("evaluate").against is None

    def spec(self, data: Shards) -> DataSpec:
        """Tokens are stored as [h, w], and have as many channels as there are of them."""
        spec = DataSpec(channels=data.manifest["num_tokens"], resolution=data.shape[-1], num_classes=data.num_classes)
        return self.condition.spec(spec, data.beside)

    @property
    def build_options(self) -> dict[str, Any]:
        """What its network is built with, beside the data."""
        return {"causal": self.objective.causal}

    def build_network(self, spec: DataSpec) -> TokenTransformer:
        """The network, randomly initialised."""
        return self.network.build(spec, **self.build_options)

    def build_objective(self, spec: DataSpec) -> Objective:
        """The objective. Where the data have neither classes nor captions, nothing is dropped."""
        objective = self.objective
        if not spec.num_classes and not spec.conditions:
            objective = objective.model_copy(update={"label_drop_probability": 0.0})
        return objective.build(spec)

    def batch(self, stored: Tensor, label: Tensor, streams: Streams, spec: DataSpec, codec: Codec) -> Batch:
        """Tokens int64 [B, N], row by row."""
        return Batch(stored.flatten(1).long(), {"label": label} if spec.num_classes else {}, streams)

    def with_beside(self, batch: Batch, beside: Tensor) -> Batch:
        return replace(batch, cond=batch.cond | self.condition.told(beside, batch.streams))

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """What `count` images of a section are asked for with, beside seeds and classes."""
        return self.condition.asked(settings, pairs, count, given)

    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
    ) -> Generates:
        """What makes images. Raises ValueError for a sampler or guidance that do not fit."""
        assert isinstance(settings, TokenSampleConfig) and weaker is None
        return TokenGenerator(network, self.reading, spec, codec, settings, null)

    def preview(self, given: ToPreview) -> Preview | None:
        return preview_images(self, given)

    def maker(self, given: ToSample) -> Maker:
        return make_images(self, given)

    def evaluations(self, settings: TokenSampleConfig) -> int:
        sampler = fitted(settings, self.objective.causal).sampler
        assert sampler is not None
        return sampler.calls * (1 + (settings.guidance.guidance_scale != 1))

    def like_samples(self, spec: DataSpec, count: int) -> Tensor:
        return torch.zeros(count, spec.resolution, spec.resolution, dtype=torch.int64)

    def sampled_in(self, settings: TokenSampleConfig) -> Precision:
        return settings.precision

    def judge(self, given: ToJudge) -> dict[str, Any]:
        return judge_tokens(self, given)

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "pipeline":
            return super().export(model, codec, format_, folder)
        usual = fitted(TokenSampleConfig(), self.objective.causal)
        return write_images(self, model, codec, usual, ExportedTokenModel, folder)

    def served(self, spec: DataSpec, classes: list[str], embeds: bool = False) -> Served | None:
        return image_columns(self, spec, classes, embeds)

    def predictor(
        self,
        model: Model,
        settings: TokenSampleConfig,
        codec: Callable[[], Codec],
        weaker: Model | None,
        embed: Embed | None = None,
    ) -> Predict:
        return Images(self, model, settings, codec(), weaker, embed)
