"""The discrete VAE of DALL-E: trained on crops, it is then the codec of other experiments (Ramesh et al. 2021)."""

from __future__ import annotations

from typing import Literal

from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.objectives.discrete_autoencoding import DiscreteAutoencoding, DiscreteAutoencodingConfig


class DVAESystem(Config):
    """A discrete VAE of pixels."""

    type: Literal["dvae"] = "dvae"
    """A discrete VAE, to be the codec of other experiments."""
    network: DVAEConfig = DVAEConfig()
    """Size of the network, and how it draws a token."""
    objective: DiscreteAutoencodingConfig = DiscreteAutoencodingConfig()
    """What a reconstruction costs, and how the temperature falls."""

    @property
    def is_conditional(self) -> bool:
        """Labels play no part."""
        return False

    @property
    def decoded(self) -> str:
        """The reconstruction that it is judged by: from the most probable tokens."""
        return "hard"

    def build_network(self, spec: DataSpec) -> DVAE:
        """The network, randomly initialised. Raises ValueError when the images do not fit."""
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> DiscreteAutoencoding:
        """The objective for images of `spec`."""
        return self.objective.build(self.network.logits_shape(spec))
