"""The decoder of another autoencoder of the same latents: the mse one of Stable Diffusion for the latents of its ema
one, or a small and fast one for previews."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from image_diffusion.codecs.autoencoders import Kind, kind_of
from image_diffusion.codecs.codec import in_slices, to_uint8
from image_diffusion.codecs.pretrained import load_pretrained, settings_of

KEY = "sample.decoder"


@dataclass(frozen=True)
class Decoder:
    """X as the pipelines of both have it, normalised by what each declares -> uint8 images [B, C, H, W].

    weights: a folder in diffusers' layout, or a name on the Hub; loaded when first used.
    """

    weights: str
    device: torch.device

    @cached_property
    def kind(self) -> Kind:
        return kind_of(settings_of(self.weights, None, KEY), self.weights)

    @cached_property
    def vae(self) -> Any:
        return load_pretrained(self.kind.network(), self.weights, None, self.device, torch.float32, KEY)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        latent = self.kind.declared(self.vae).restore(x.to(self.device, torch.float32))
        pixels = self.kind.downsampling**2 * latent.shape[2] * latent.shape[3]
        return in_slices(lambda part: to_uint8(self.kind.decode(self.vae, part)), latent, pixels)


def check_decoder(key: str, weights: str, channels: int, downsampling: int) -> None:
    """Raise ValueError where an autoencoder cannot decode latents of that shape, from its config.json alone."""
    other = kind_of(settings_of(weights, None, key), weights)
    if (other.channels, other.downsampling) != (channels, downsampling):
        raise ValueError(
            f"{key} is {weights}, which decodes latents of {other.channels} channels and 1/{other.downsampling} of an "
            f"image's edge, but those of the codec have {channels} and 1/{downsampling}. Name one of the same latents."
        )
