"""The small KL autoencoder: trained on crops, it is then the codec of other experiments."""

from __future__ import annotations

from typing import Literal

from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import Autoencoder, AutoencoderConfig
from image_diffusion.objectives.autoencoding import Autoencoding, AutoencodingConfig


class AutoencoderSystem(Config):
    """A KL autoencoder of pixels."""

    type: Literal["autoencoder"] = "autoencoder"
    """A KL autoencoder, to be the codec of other experiments."""
    network: AutoencoderConfig = AutoencoderConfig()
    """Size of the network."""
    objective: AutoencodingConfig = AutoencodingConfig()
    """Weights of the loss."""

    @property
    def is_conditional(self) -> bool:
        """Labels play no part."""
        return False

    @property
    def decoded(self) -> str:
        """The reconstruction that it is judged by: from the mean of the posterior."""
        return "mean"

    def build_network(self, spec: DataSpec) -> Autoencoder:
        """The network, randomly initialised. Raises ValueError when the images do not fit."""
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> Autoencoding:
        """The objective for images of `spec`."""
        return self.objective.build(self.network.latent_shape(spec))
