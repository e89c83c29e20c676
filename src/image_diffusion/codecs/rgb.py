"""No codec: the network works on pixels in [-1, 1], read straight from the crops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from image_diffusion.codecs.codec import Codec, CodecSettings, LatentShape, Packed, from_uint8, to_uint8
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec


class Rgb(CodecSettings):
    """Pixels. The codec and its configuration are one thing, since there is nothing to load."""

    type: Literal["rgb"] = "rgb"
    """Pixels, scaled to [-1, 1]."""

    @property
    def name(self) -> None:
        """There is no folder of latents."""
        return None

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """The codec: there is nothing to load."""
        return self

    @property
    def bounded(self) -> bool:
        return True

    @property
    def identity(self) -> dict[str, Any]:
        return {"type": "rgb"}

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """What the data fix about a network: pixels stay what they are."""
        return images

    def compile_encoder(self) -> None:
        """There is none."""

    def encode(self, images: Tensor) -> Tensor:
        """Pixels are stored as they are: there is nothing to encode. Raises ValueError."""
        raise ValueError("Codec rgb has no latents. Train on the crops themselves, or set codec.type to stability_vae.")

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return from_uint8(stored)

    def normalise(self, latent: Tensor) -> Tensor:
        return latent

    def decode(self, x: Tensor) -> Tensor:
        return to_uint8(x)

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Pixels are not decoded. Raises ValueError."""
        raise ValueError(f"Codec rgb has no decoder that {weights} could replace. Leave sample.decoder out.")

    def packed(self) -> Packed:
        return Packed()

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        return cls()
