"""The discrete VAE of DALL-E: trained on crops, it is then the codec of other experiments (Ramesh et al. 2021).

Defaults that differ from those of lucidrains/DALLE-pytorch (docs/systems.md has all):

    key                 original  here   why
    train.global_batch  8         256    one batch size for all systems; say what the machine holds
    data.resize         bilinear  exact  ADM's crop for every system, so that their data are the same
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.types import DataSpec
from image_diffusion.data.encoding import EncodeConfig
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.objectives.discrete_autoencoding import DiscreteAutoencoding, DiscreteAutoencodingConfig
from image_diffusion.systems.codec.family import CodecSystem
from image_diffusion.systems.codec.hub_export import write_tokens
from image_diffusion.systems.given import CardUse, Model, Section


class DVAESystem(CodecSystem):
    """A discrete VAE of pixels."""

    type: Literal["dvae"] = "dvae"
    """A discrete VAE, to be the codec of other experiments."""
    network: DVAEConfig = DVAEConfig()
    """Size of the network, and how it draws a token."""
    objective: DiscreteAutoencodingConfig = DiscreteAutoencodingConfig()
    """What a reconstruction costs, and how the temperature falls."""

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
    exports: ClassVar[tuple[str, ...]] = ("pipeline",)
    decoded: ClassVar[str] = "hard"

    def build_network(self, spec: DataSpec) -> DVAE:
        """The network, randomly initialised. Raises ValueError when the images do not fit."""
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> DiscreteAutoencoding:
        """The objective for images of `spec`."""
        return self.objective.build(self.network.logits_shape(spec))

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "pipeline":
            return super().export(model, codec, format_, folder)
        return write_tokens(self, model, folder)
