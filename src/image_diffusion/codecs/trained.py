"""Codecs that other experiments train and write to their weights folders: KL autoencoders, and discrete VAEs. The
latents of a discrete VAE are the expected embedding under its distribution over tokens; or they are its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.codecs.base import (
    Codec,
    CodecSettings,
    LatentShape,
    ScaledCodec,
    Tokens,
    latent_spec,
    on_device,
    to_images,
    to_x,
)
from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.config.base import parse
from image_diffusion.core.files.weights import read_model, read_weights
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import Autoencoder, AutoencoderConfig
from image_diffusion.networks.dvae import DVAE, DVAEConfig


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


class Trained(CodecSettings):
    """Codec trained by another experiment, whose system is an autoencoder."""

    type: Literal["trained"] = "trained"
    """A codec trained by another experiment."""
    experiment: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the experiment that trains the codec."""
    scale: float | None = Field(None, gt=0)
    """Factor of latents; unset: the inverse of the standard deviation of the encoded data set."""

    @property
    def name(self) -> str:
        return self.experiment

    @property
    def takes_arrays(self) -> bool:
        return True

    @property
    def trained_by(self) -> str:
        return self.experiment

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        if autoencoder is None:
            raise ValueError(
                f"codec.experiment is {self.experiment}, which trains no autoencoder. Name an experiment that does."
            )
        return latent_spec(images, autoencoder.latent_channels, autoencoder.downsampling)

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec in a weights folder. Raises ValueError when the folder does not hold an autoencoder.

        scale: of the encoded data set, used if the configuration sets none; None while encoding.
        """
        if weights is None:
            raise ValueError(f"The codec of experiment {self.experiment} needs its weights folder.")
        model = read_model(weights)
        kind, where = model["system"]["type"], f"{weights}/model.json"
        spec: DataSpec = parse(DataSpec, model["spec"], where)

        def load(config: type[AutoencoderConfig] | type[DVAEConfig]) -> nn.Module:
            network: nn.Module = parse(config, model["system"]["network"], where).build(spec)
            network.load_state_dict(read_weights(weights)[0])
            return on_device(network.to(dtype), device)

        scale, levels = self.scale or scale or 1.0, spec.levels
        if kind == "autoencoder":
            identity = {"type": "kl", "sha256": model["sha256"]}
            return KlCodec(identity, lambda: cast("Autoencoder", load(AutoencoderConfig)).vae, scale, levels)
        if kind == "dvae":
            identity = {"type": "dvae", "sha256": model["sha256"]}
            return DVAECodec(identity, lambda: cast("DVAE", load(DVAEConfig)), scale, levels)
        raise ValueError(
            f"{weights} was trained by a {kind}, which is not a codec. Set codec.experiment to one whose system is "
            f"an autoencoder or a dvae."
        )

    def tokens(self, weights: Path | None, device: torch.device, dtype: torch.dtype) -> DVAETokens:
        """Return the tokens of the discrete VAE in a weights folder. Raises ValueError when the folder holds another
        network."""
        codec = self.build(weights, None, device, dtype)
        if weights is None or not isinstance(codec, DVAECodec):
            raise ValueError(
                f"encode.tokens is set, but {self.experiment} trains no discrete VAE. Leave encode.tokens out."
            )
        return DVAETokens(codec, int(read_model(weights)["system"]["network"]["num_tokens"]))

    def encoded_by(self) -> Self:
        return self.model_copy(update={"scale": None})
