"""Latents of a KL autoencoder (Rombach et al. 2022, section 3.1), diffusers' `AutoencoderKL`.

The same class serves the pretrained SD VAE and the small autoencoder that an experiment trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from image_diffusion.codecs.codec import from_uint8, in_slices, to_uint8
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec

if TYPE_CHECKING:  # diffusers takes seconds to import, and training on stored latents needs none of it
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL


@dataclass(frozen=True)
class KlCodec:
    """An autoencoder and its scale.

    identity: says which weights these are. load: gives the autoencoder, in evaluation mode, on the device it is to run
    on; called once, when an image is first encoded or decoded. scale: what a latent is multiplied with to become x, so
    that x has a standard deviation near 1 (0.18215 for the SD VAE).
    """

    identity: dict[str, Any]
    load: Callable[[], AutoencoderKL]
    scale: float

    @cached_property
    def vae(self) -> AutoencoderKL:
        return self.load()

    @property
    def bounded(self) -> bool:
        """Latents have no range."""
        return False

    def compile_encoder(self) -> None:
        self.vae.encoder.compile()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        x = from_uint8(images.to(self.vae.device)).to(self.vae.dtype)
        posterior = self.vae.encode(x).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float32)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        mean, std = stored.to(torch.float32).unbind(dim=1)
        return (mean + std * streams.normal("posterior", tuple(mean.shape[1:]))) * self.scale

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        latent = (x / self.scale).to(self.vae.device, self.vae.dtype)
        edge = 2 ** (len(self.vae.config.block_out_channels) - 1)
        pixels = edge**2 * latent.shape[2] * latent.shape[3]
        return in_slices(lambda part: to_uint8(self.vae.decode(part).sample), latent, pixels)


def latent_spec(images: DataSpec, channels: int, downsampling: int) -> DataSpec:
    """What the data fix once images are latents. Raises ValueError when the resolution cannot be divided."""
    if images.resolution % downsampling:
        raise ValueError(
            f"data.resolution is {images.resolution}, but the codec divides each edge by {downsampling}. "
            f"Choose a multiple of {downsampling}."
        )
    return DataSpec(channels=channels, resolution=images.resolution // downsampling, num_classes=images.num_classes)


def load_vae(weights: str, device: torch.device, dtype: torch.dtype) -> AutoencoderKL:
    """The autoencoder in a local folder (diffusers' layout), or from the Hub when `weights` names no folder.

    Raises ValueError when it is neither here nor to be had.
    """
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    folder = Path(weights).expanduser()
    try:
        vae = AutoencoderKL.from_pretrained(str(folder) if folder.is_dir() else weights, torch_dtype=dtype)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"The autoencoder '{weights}' could not be loaded: {reason} Without access to the Hugging Face Hub, copy "
            f"the model's folder (config.json and diffusion_pytorch_model.safetensors) to this machine and set "
            f"codec.weights to its path."
        ) from None
    return vae.to(device).eval().requires_grad_(False)
