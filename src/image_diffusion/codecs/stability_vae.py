"""The pretrained autoencoder of Stable Diffusion, from the Hub or from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from image_diffusion.codecs.codec import Codec, LatentShape
from image_diffusion.codecs.kl import KlCodec, latent_spec, load_vae
from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec


class StabilityVae(Config):
    """Stable Diffusion's autoencoder: 8 pixels along an edge to one, 4 channels."""

    type: Literal["stability_vae"] = "stability_vae"
    """Stable Diffusion's pretrained autoencoder."""
    weights: str = "stabilityai/sd-vae-ft-ema"
    """Name on the Hugging Face Hub, or path of a local folder in diffusers' layout."""
    scale: float = Field(0.18215, gt=0)
    """What latents are multiplied with, so that their standard deviation is near 1."""

    @property
    def name(self) -> str:
        """The folder of the latents."""
        return Path(self.weights).name

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """What the data fix about a network on these latents. Raises ValueError when the images do not fit."""
        if images.channels != 3:
            raise ValueError(f"data.channels is {images.channels}, but the codec stability_vae reads RGB. Set it to 3.")
        return latent_spec(images, channels=4, downsampling=8)

    def build(self, weights: Path | None, scale: float | None, device: torch.device, dtype: torch.dtype) -> Codec:
        """The codec; its weights are loaded when first used. `weights` and `scale` are its configuration's own."""
        return KlCodec(
            identity={"type": "kl", "weights": self.weights},
            load=lambda: load_vae(self.weights, device, dtype),
            scale=self.scale,
        )
