"""No codec: the network works on pixels in [-1, 1], read straight from the crops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from image_diffusion.codecs.base import Codec, CodecSettings, LatentShape, Packed, from_uint8, to_uint8
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec


class Rgb(CodecSettings):
    """Codec of pixels. The codec and its configuration are one thing, since it has nothing to load."""

    type: Literal["rgb"] = "rgb"
    """Pixels, scaled to [-1, 1]."""

    @property
    def name(self) -> None:
        """Return None: pixels have no folder of latents."""
        return None

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec, which has no weights to load."""
        return self

    @property
    def bounded(self) -> bool:
        return True

    @property
    def identity(self) -> dict[str, Any]:
        return {"type": "rgb"}

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data fix for a network: pixels stay unchanged."""
        return images

    def compile_encoder(self) -> None:
        """Do nothing: pixels have no encoder."""

    def encode(self, images: Tensor) -> Tensor:
        """Raise ValueError: pixels are stored unencoded."""
        raise ValueError("The codec rgb has no latents. Train on the crops, or set codec.type to stability_vae.")

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return from_uint8(stored)

    def normalise(self, latent: Tensor) -> Tensor:
        return latent

    def decode(self, x: Tensor) -> Tensor:
        return to_uint8(x)

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Raise ValueError: pixels are not decoded."""
        raise ValueError(f"sample.decoder is {weights}, but the codec rgb decodes nothing. Leave it out.")

    def packed(self) -> Packed:
        return Packed()

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        return cls()
