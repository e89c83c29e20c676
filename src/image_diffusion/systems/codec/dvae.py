"""Discrete VAE of DALL-E, trained on crops to be the codec of other experiments (Ramesh et al. 2021).

Defaults that differ from those of lucidrains/DALLE-pytorch (docs/systems.md has all):

    key                 original  here  why
    train.global_batch  8         256   one batch size for all systems; set it to what your machine holds
    data.crop.type      resize    adm   ADM's crop for all systems, so that they can share their data
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.data.encoded.latents import EncodeConfig
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.objectives.autoencoding import DiscreteAutoencodingConfig, QuantisedAutoencoding
from image_diffusion.systems.base import Others, Sections
from image_diffusion.systems.codec.base import CodecSystem
from image_diffusion.systems.interface import Section


class DVAESystem(CodecSystem):
    """A discrete VAE of pixels."""

    type: Literal["dvae"] = "dvae"
    """A discrete VAE, to be the codec of other experiments."""
    network: DVAEConfig = DVAEConfig()
    """Size of the network, and the sampling of its tokens."""
    objective: DiscreteAutoencodingConfig = DiscreteAutoencodingConfig()
    """Reconstruction loss and temperature schedule."""

    sections: ClassVar[Mapping[str, Section]] = {
        **CodecSystem.sections,
        "encode": Section(EncodeConfig, EncodeConfig()),
    }
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": {"type": "adam", "lr": 1e-3},
        "schedule": {"type": "exponential", "decay": 0.98, "every_steps": 100},
        "ema": {"type": "exponential", "rates": ()},
        "weights": "raw",
        "flip_probability": 0.0,
    }
    decoded: ClassVar[str] = "hard"

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        self.objective.check(self.network.deterministic_key)
        return self

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        encode = experiment.section("encode")
        unused = sorted(encode.model_fields_set - {"tokens"})
        if unused and not encode.tokens:
            raise ValueError(
                f"encode.{unused[0]} is set, but encode.tokens is not: nothing is encoded. Set encode.tokens to true, "
                f"or leave it out."
            )

    def build_network(self, spec: DataSpec) -> DVAE:
        return self.network.build(spec)

    def build_own_objective(self, spec: DataSpec) -> Objective:
        if self.network.deterministic_key is not None:
            weight = None if self.network.vector_quantiser is None else self.objective.commitment_weight
            return QuantisedAutoencoding(self.objective.reconstruction, weight)
        return self.objective.build(self.network.logits_shape(spec))
