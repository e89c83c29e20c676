"""Small KL autoencoder, trained on crops to be the codec of other experiments."""

from __future__ import annotations

from typing import ClassVar, Literal

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import Autoencoder, AutoencoderConfig
from image_diffusion.objectives.autoencoding import Autoencoding, AutoencodingConfig
from image_diffusion.systems.codec.base import CodecSystem


class AutoencoderSystem(CodecSystem):
    """A KL autoencoder of pixels."""

    type: Literal["autoencoder"] = "autoencoder"
    """A KL autoencoder, to be the codec of other experiments."""
    network: AutoencoderConfig = AutoencoderConfig()
    """Size of the network."""
    objective: AutoencodingConfig = AutoencodingConfig()
    """Weights of the loss."""

    decoded: ClassVar[str] = "mean"

    def check_network(self, spec: DataSpec) -> None:
        self.network.check(spec)  # building it would import diffusers

    def build_network(self, spec: DataSpec) -> Autoencoder:
        return self.network.build(spec)

    def build_own_objective(self, spec: DataSpec) -> Autoencoding:
        return Autoencoding(self.objective.kl_weight, self.network.latent_shape(spec))
