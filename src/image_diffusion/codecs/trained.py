"""A codec that another experiment trains: its weights folder is the codec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.kl import KlCodec, latent_spec
from image_diffusion.core.config import Config, parse
from image_diffusion.core.types import DataSpec
from image_diffusion.core.weights import read_model, read_weights
from image_diffusion.networks.autoencoder import AutoencoderConfig

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL


class Trained(Config):
    """The codec trained by an experiment whose system is an autoencoder."""

    type: Literal["trained"] = "trained"
    """A codec trained by another experiment."""
    experiment: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of that experiment."""
    scale: float | None = Field(None, gt=0)
    """What latents are multiplied with; unset: one over the standard deviation of the encoded data set."""

    @property
    def name(self) -> str:
        """The folder of the latents."""
        return self.experiment

    def spec(self, images: DataSpec, autoencoder: AutoencoderConfig | None) -> DataSpec:
        """What the data fix about a network on these latents. Raises ValueError when the images do not fit."""
        if autoencoder is None:
            raise ValueError(
                f"codec.experiment is {self.experiment}, which trains no autoencoder. Name an experiment that does."
            )
        return latent_spec(images, autoencoder.latent_channels, autoencoder.downsampling)

    def build(self, weights: Path | None, scale: float | None, device: torch.device, dtype: torch.dtype) -> Codec:
        """The codec in a weights folder. Raises ValueError when it holds something else than an autoencoder.

        scale: of the encoded data set, used when the configuration names none; None while encoding.
        """
        if weights is None:
            raise ValueError(f"The codec of experiment {self.experiment} needs its weights folder.")
        model = read_model(weights)
        if model["system"]["type"] != "autoencoder":
            raise ValueError(
                f"{weights} was trained by a {model['system']['type']}, which is no codec. Set codec.experiment to an "
                f"experiment whose system is an autoencoder."
            )

        def load() -> AutoencoderKL:
            where = f"{weights}/model.json"
            spec: DataSpec = parse(DataSpec, model["spec"], where)
            network = parse(AutoencoderConfig, model["system"]["network"], where).build(spec)
            network.load_state_dict(read_weights(weights)[0])
            vae: AutoencoderKL = network.vae.to(device).eval().requires_grad_(False)
            return vae if dtype == torch.float32 else vae.to(dtype)

        return KlCodec(identity={"type": "kl", "sha256": model["sha256"]}, load=load, scale=self.scale or scale or 1.0)
