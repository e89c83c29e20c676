"""Latents of a KL autoencoder (Rombach et al. 2022, section 3.1), diffusers' `AutoencoderKL`.

The same class serves the pretrained SD VAE and the small autoencoder that an experiment trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from image_diffusion.codecs.base import Packed, in_slices, packed_levels, to_images, to_x, unpacked_levels
from image_diffusion.codecs.diffusers_families import Decoder
from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import Streams

if TYPE_CHECKING:  # diffusers takes seconds to import, and training on stored latents needs none of it
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL


@dataclass(frozen=True)
class KlCodec:
    """An autoencoder and its scale.

    identity: says which weights these are. load: gives the autoencoder, in evaluation mode, on the device it is to run
    on; called once, when an image is first encoded or decoded. scale: what a latent is multiplied with to become x, so
    that x has a standard deviation near 1 (0.18215 for the SD VAE). decoder: decodes in place of the autoencoder's own.
    levels: of the arrays that it was trained on; None for pictures.
    """

    identity: dict[str, Any]
    load: Callable[[], AutoencoderKL]
    scale: float
    decoder: Decoder | None = None
    levels: Levels | None = None

    @cached_property
    def vae(self) -> AutoencoderKL:
        return self.load()

    @property
    def bounded(self) -> bool:
        """Return False: latents have no range."""
        return False

    def compile_encoder(self) -> None:
        self.vae.encoder.compile()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        x = to_x(images.to(self.vae.device), self.levels).to(self.vae.dtype)
        posterior = self.vae.encode(x).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float32)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        stored = stored.to(torch.float32)
        latent = stored[:, 0]
        if stored.shape[1] > 1:  # else others have drawn it, once
            latent = latent + stored[:, 1] * streams.normal("posterior", tuple(latent.shape[1:]))
        return latent * self.scale

    def normalise(self, latent: Tensor) -> Tensor:
        return latent * self.scale

    def with_decoder(self, weights: str, device: torch.device) -> KlCodec:
        return replace(self, decoder=Decoder(weights, device))

    def packed(self) -> Packed:
        return Packed({"identity": self.identity, "scale": self.scale, **packed_levels(self.levels)}, self.vae)

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        settings = packed.settings
        return cls(
            identity=settings["identity"],
            load=lambda: cast("AutoencoderKL", packed.network),
            scale=settings["scale"],
            levels=unpacked_levels(settings),
        )

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        if self.decoder is not None:
            return self.decoder(x)
        latent = (x / self.scale).to(self.vae.device, self.vae.dtype)
        edge = 2 ** (len(self.vae.config.block_out_channels) - 1)
        pixels = edge**2 * latent.shape[2] * latent.shape[3]
        return in_slices(lambda part: to_images(self.vae.decode(part).sample, self.levels), latent, pixels)
