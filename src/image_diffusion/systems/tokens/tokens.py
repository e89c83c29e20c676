"""Tokens: a transformer over the tokens of a discrete VAE, the second half of DALL-E (Ramesh et al. 2021).

By default it is MaskGIT, which predicts many tokens at once (Chang et al. 2022). It is evaluated by its images, as a
diffusion, and by the bits per token of held-out images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.tokens import TokensOf
from image_diffusion.core.files.partial_results import Arrays, batches
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import resolution_of
from image_diffusion.core.types import Batch, DataSpec, Objective
from image_diffusion.data.encoded.latents import EncodeConfig
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import padded_batches, storage_groups
from image_diffusion.networks.token_transformer import TokenTransformer, TokenTransformerConfig
from image_diffusion.objectives import TokenObjective
from image_diffusion.objectives.tokens import MaskedTokens, bits_of, hidden_bits, hide
from image_diffusion.systems.base import Others, Sections, System, on_best_device, spec_of
from image_diffusion.systems.diffusion.checks import check_judged, check_kept, check_negative_prompt, check_pairs
from image_diffusion.systems.diffusion.conditioning import Conditions
from image_diffusion.systems.diffusion.conditions.encoded import TextCondition
from image_diffusion.systems.diffusion.conditions.vector import LabelCondition
from image_diffusion.systems.diffusion.evaluation import DiffusionEvaluation
from image_diffusion.systems.diffusion.generator import SampleConfig, check_labels
from image_diffusion.systems.diffusion.image_generation import ImageSampling
from image_diffusion.systems.diffusion.sweep import checked_points
from image_diffusion.systems.evaluation import EvaluationInputs
from image_diffusion.systems.interface import Section, TrainedNetwork, all_but
from image_diffusion.systems.pairs.captions import CaptionPairs
from image_diffusion.systems.pictures import Pictures
from image_diffusion.systems.tokens.generator import (
    KEYS,
    SWEPT,
    TokenGenerator,
    TokenReading,
    TokenSampleConfig,
    TokenSweepConfig,
    check_made,
    fitted,
)
from image_diffusion.systems.warm_start import WarmStart

_STRATA = 8


@dataclass(frozen=True)
class TokenEvaluation(DiffusionEvaluation):
    """Evaluation of images, and "bits_per_token" of the validation split.

    causal: whether the network predicts each token from the earlier ones. has_captions: whether it is conditioned on
    captions instead of classes.
    """

    reads_encoded: ClassVar[bool] = True

    causal: bool = False
    has_captions: bool = False

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        result = super().evaluate(inputs)
        if inputs.encoded is not None and inputs.model is not None and not self.has_captions:
            bits, description = bits_per_token(inputs.model, inputs.encoded, self.causal)
            result["metrics"] |= bits
            result["protocol"]["bits_per_token"] = description
        return result


@torch.no_grad()
def bits_per_token(model: TrainedNetwork, encoded: Path, causal: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entry of metrics.json, and its protocol; both are empty without held-out images.

    For a causal network it is -log2 p(tokens | class) / N, exact. Otherwise it is the bound of Hoogeboom et al. 2022
    ("Autoregressive diffusion models", section 3): the mean bits of k masked tokens, k uniform in 1 … N; each image is
    evaluated with eight values of k, one in each eighth of that range. Raises ValueError for tokens of another codec.
    """
    data = open_shards(encoded, "validation")
    if data.manifest["codec"] != model.codec["identity"]:
        raise ValueError(
            f"{encoded} holds tokens of the codec {data.manifest['codec']}, but the model learned from those of "
            f"{model.codec['identity']}. Run encode again."
        )
    if not data.num_samples:
        return {}, {}
    network: Any = on_best_device(model)
    device = next(network.parameters()).device

    def measure(chosen: NDArray[np.int64]) -> Arrays:
        parts = []
        for count, rows in padded_batches(chosen):
            tokens = data.gather(rows).to(device).long().flatten(1)
            label = torch.from_numpy(data.labels[rows]).to(device)
            cond = {"label": label} if model.spec.num_classes else {}
            number = torch.from_numpy(rows).to(device)
            bits = bits_of(network(tokens, **cond), tokens).mean(1) if causal else _bound(network, tokens, cond, number)
            parts.append(bits[:count])
        return {"bits": torch.cat(parts).cpu().numpy()}

    once, parts = batches(["bits", data.digest]), []
    with Progress("bits", data.num_samples, "image") as progress:
        for chosen in storage_groups(np.arange(data.num_samples)):
            parts.append(torch.from_numpy(once(str(chosen[0]), partial(measure, chosen))["bits"]))
            progress.advance(len(chosen))
    bits = torch.cat(parts).double()
    entry = mean_estimate(bits, 0).as_dict()
    how = "exact" if causal else f"a bound, from {_STRATA} masks of each image"
    return {"bits_per_token": entry}, {"data": data.digest, "num_samples": len(bits), "how": how}


def _bound(network: Any, tokens: Tensor, cond: dict[str, Tensor], number: Tensor) -> Tensor:
    """Return the bound of each image, [B], in bits per token. number: int64 [B], of the images; they key the masks."""
    places, total = tokens.shape[1], torch.zeros(len(tokens), device=tokens.device)
    for stratum in range(_STRATA):
        streams = Streams(0, torch.full_like(number, stratum), number)
        share = (stratum + streams.uniform("mask_ratio")) / _STRATA
        hidden = hide(streams, 1 + (share * places).long(), places)
        total += hidden_bits(network, tokens, hidden, cond)[0]
    return total / _STRATA


@dataclass(frozen=True, kw_only=True)
class TokenSampling(ImageSampling):
    """Sampling of tokens, which the codec decodes. reading: the properties of the system that it depends on."""

    reading: TokenReading

    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
        pictures: Pictures | None = None,
    ) -> TokenGenerator:
        assert isinstance(settings, TokenSampleConfig) and weaker is None and pictures is None
        return TokenGenerator(network, self.reading, spec, codec, settings, null)

    def num_evaluations(self, settings: TokenSampleConfig) -> int:
        sampler = fitted(settings, self.reading.causal).sampler
        assert sampler is not None
        return sampler.calls * (1 + (settings.guidance.guidance_scale != 1))

    def decoder_input(self, spec: DataSpec, count: int) -> Tensor:
        return torch.zeros(count, *spec.size, dtype=torch.int64)


class TokensSystem(System):
    """A transformer over tokens."""

    type: Literal["tokens"] = "tokens"
    """A transformer over the tokens of a discrete codec."""
    network: TokenTransformerConfig = TokenTransformerConfig()
    """Size of the network."""
    objective: TokenObjective = MaskedTokens()
    """Prediction task: hidden tokens from all others, or each token from those before it."""
    condition: Annotated[LabelCondition | TextCondition, Field(discriminator="type")] = LabelCondition()
    """Condition of the network, which precedes the tokens of an image: its class, or a text."""

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
        "optimizer": {"type": "adamw", "lr": 1e-4, "betas": (0.9, 0.96), "weight_decay": 0.0}
    }
    reads: ClassVar = ("tokens",)
    warm_start: ClassVar = WarmStart(class_rows=("y_embedder.embedding_table.weight",), positions=("pos_embed",))

    @property
    def conditioning(self) -> Conditions:
        """Return the conditions of the network, by name."""
        return Conditions.written_as(self.condition)

    @property
    def joined_kinds(self) -> tuple[str, ...]:
        return self.conditioning.reads

    @property
    def reading(self) -> TokenReading:
        """Return the properties of the system that sampling depends on."""
        return TokenReading(causal=self.objective.causal, drops_labels=self.objective.label_drop_probability > 0)

    def check(self, experiment: Sections, others: Others) -> None:
        check_pairs(self.conditioning, self.joined_kinds, experiment)
        check_judged(experiment)
        check_kept(experiment, others)
        super().check(experiment, others)
        spec = spec_of(experiment, others.codec)
        reading, train = self.reading, experiment.train
        classes = experiment.data.source.known_classes() if self.condition.reads is None else None
        for section in ("sample", "preview") if train.grid_every_steps is not None else ("sample",):
            settings: TokenSampleConfig = experiment.section(section)
            check_made(section, settings, reading, classes, spec)
            check_labels(section, settings.labels, classes)
            self.condition.check(section, settings)
            check_negative_prompt(section, settings)
        for key, point in checked_points(experiment.section("sweep"), experiment.section("sample"), train):
            assert isinstance(point, TokenSampleConfig)
            check_made(key, point, reading, classes, spec)

    def spec(self, data: Shards) -> DataSpec:
        """Return the shapes that the data fix: tokens are stored as [h, w]; the number of channels is the size of the
        codebook."""
        resolution = resolution_of(*data.shape[-2:])
        spec = DataSpec(
            channels=data.manifest["num_tokens"],
            resolution=resolution,
            num_classes=data.num_classes,
            levels=data.levels,
        )
        return self.conditioning.spec(spec, data.joined_sets)

    @property
    def build_options(self) -> dict[str, Any]:
        """Return the options of `network.build` other than the data spec."""
        return {"causal": self.objective.causal}

    def build_network(self, spec: DataSpec) -> TokenTransformer:
        return self.network.build(spec, **self.build_options)

    def build_objective(self, spec: DataSpec) -> Objective:
        """Build the objective. Without classes and captions in the data, nothing is dropped."""
        objective = self.objective
        if not spec.num_classes and not spec.conditions:
            objective = objective.model_copy(update={"label_drop_probability": 0.0})
        return objective.build(spec)

    def batch(
        self,
        stored: Tensor,
        label: Tensor,
        streams: Streams,
        spec: DataSpec,
        codec: Codec,
        joined_sets: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Return the batch of tokens int64 [B, N], row by row."""
        # Without classes the network has no embedding table to look labels up in.
        cond = {"label": label} if spec.num_classes else {}
        cond |= self.conditioning.training_conditions(joined_sets or {}, streams, spec)
        return Batch(stored.flatten(1).long(), cond, streams)

    def sampling(self) -> TokenSampling:
        return TokenSampling(condition=self.conditioning, reading=self.reading)

    def evaluation(self) -> TokenEvaluation:
        return TokenEvaluation(causal=self.objective.causal, has_captions=self.condition.reads is not None)
