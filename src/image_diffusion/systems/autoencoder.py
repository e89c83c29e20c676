"""The small KL autoencoder: trained on crops, it is then the codec of other experiments."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import Autoencoder, AutoencoderConfig
from image_diffusion.objectives.autoencoding import Autoencoding, AutoencodingConfig
from image_diffusion.systems.codec.family import CodecSystem
from image_diffusion.systems.codec.vae_export import write_vae
from image_diffusion.systems.given import CardUse, Model


class AutoencoderSystem(CodecSystem):
    """A KL autoencoder of pixels."""

    type: Literal["autoencoder"] = "autoencoder"
    """A KL autoencoder, to be the codec of other experiments."""
    network: AutoencoderConfig = AutoencoderConfig()
    """Size of the network."""
    objective: AutoencodingConfig = AutoencodingConfig()
    """Weights of the loss."""

    exports: ClassVar[tuple[str, ...]] = ("diffusers",)
    decoded: ClassVar[str] = "mean"

    def check_network(self, spec: DataSpec) -> None:
        self.network.check(spec)  # building it would import diffusers

    def build_network(self, spec: DataSpec) -> Autoencoder:
        """The network, randomly initialised. Raises ValueError when the images do not fit."""
        return self.network.build(spec)

    def build_own_objective(self, spec: DataSpec) -> Autoencoding:
        """The objective for images of `spec`."""
        return self.objective.build(self.network.latent_shape(spec))

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        return write_vae(model, folder)
