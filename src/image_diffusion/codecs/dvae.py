"""Latents of a discrete VAE, the expected embedding under its distribution over tokens; or its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from image_diffusion.codecs.base import ScaledCodec, Tokens, to_images, to_x
from image_diffusion.core.random.streams import Streams
from image_diffusion.networks.dvae import DVAE


@dataclass(frozen=True)
class DVAECodec(ScaledCodec[DVAE]):
    """A discrete VAE and its scale. Latents are deterministic: their standard deviation is stored as 0, and nothing is
    drawn."""

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        latent = self.network.soft_latent(self.pixels(images)).to(torch.float32)
        return torch.stack([latent, torch.zeros_like(latent)], dim=1)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return stored[:, 0].to(torch.float32) * self.scale

    def with_decoder(self, weights: str, device: torch.device) -> DVAECodec:
        """Raise ValueError: the decoder of a discrete VAE cannot be replaced."""
        raise ValueError(f"sample.decoder is {weights}, but a discrete VAE has one decoder only. Leave it out.")

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        weight = self.network.codebook.weight
        return to_images(self.network.decode((x / self.scale).to(weight.device, weight.dtype)), self.levels)

    def pixels(self, images: Tensor) -> Tensor:
        """Convert images [B, C, H, W] to the input of the network."""
        weight = self.network.codebook.weight
        return to_x(images.to(weight.device), self.levels).to(weight.dtype)


@dataclass(frozen=True)
class DVAETokens(Tokens):
    """Most probable tokens of a discrete VAE, in place of latents."""

    codec: DVAECodec

    type = "dvae_tokens"

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        return self.codec.network.indices(self.codec.pixels(images))

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        network = self.codec.network
        latent = network.hard_latent(tokens.to(network.codebook.weight.device).long())
        return to_images(network.decode(latent), self.codec.levels)
