"""Latents of a KL autoencoder (Rombach et al. 2022, section 3.1), diffusers' `AutoencoderKL`.

The same class serves the pretrained SD VAE and the small autoencoder that an experiment trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from image_diffusion.codecs.base import ScaledCodec, in_slices, sample_posterior, to_images, to_x
from image_diffusion.codecs.diffusers_families import Decoder
from image_diffusion.core.random.streams import Streams


@dataclass(frozen=True)
class KlCodec(ScaledCodec[Any]):
    """An `AutoencoderKL`, which takes seconds to import, and its scale (0.18215 for the SD VAE). decoder: replaces the
    autoencoder's own."""

    decoder: Decoder | None = None

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        x = to_x(images.to(self.network.device), self.levels).to(self.network.dtype)
        posterior = self.network.encode(x).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float32)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return self.normalise(sample_posterior(stored, streams))

    def with_decoder(self, weights: str, device: torch.device) -> KlCodec:
        return replace(self, decoder=Decoder(weights, device))

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        if self.decoder is not None:
            return self.decoder(x)
        vae = self.network
        latent = (x / self.scale).to(vae.device, vae.dtype)
        downsampling = 2 ** (len(vae.config.block_out_channels) - 1)
        return in_slices(lambda part: to_images(vae.decode(part).sample, self.levels), latent, downsampling)
