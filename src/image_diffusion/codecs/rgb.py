"""Codec of pixels: the network works on the crops, pictures or arrays, scaled to [-1, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import PrivateAttr
from torch import Tensor

from image_diffusion.codecs.base import Codec, CodecSettings, LatentShape, Packed, packed_levels, to_images, to_x
from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec


class Rgb(CodecSettings):
    """Codec of pixels. It is its own configuration, since it loads nothing."""

    type: Literal["rgb"] = "rgb"
    """Pixels, scaled to [-1, 1]."""

    _levels: Levels | None = PrivateAttr(None)

    @property
    def name(self) -> None:
        """Return None: pixels have no folder of latents."""
        return None

    @property
    def takes_arrays(self) -> bool:
        return True

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Self:
        """Build the codec, which has no weights to load. scale: the levels of arrays; None for pictures."""
        codec = self.model_copy()
        codec._levels = None if scale is None else Levels(**scale)
        return codec

    def scale_of(self, statistics: Mapping[str, Any] | None) -> Any:
        """Return the levels of arrays; None for pictures."""
        return statistics

    @property
    def bounded(self) -> bool:
        return True

    @property
    def identity(self) -> dict[str, Any]:
        return {"type": "rgb"}

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data determine for a network, which are those of the crops."""
        return images

    def compile_encoder(self) -> None:
        """Do nothing: pixels have no encoder."""

    def encode(self, images: Tensor) -> Tensor:
        """Raise ValueError: pixels are stored unencoded."""
        raise ValueError("The codec rgb has no latents. Train on the crops, or set codec.type to stability_vae.")

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return self.pixels(stored)

    def pixels(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] of the data set's type to float32 in [-1, 1]."""
        return to_x(images, self._levels)

    def normalise(self, latent: Tensor) -> Tensor:
        return latent

    def decode(self, x: Tensor) -> Tensor:
        """Map x to images [B, C, H, W] of the data set's type."""
        return to_images(x, self._levels)

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Raise ValueError: pixels have no decoder."""
        raise ValueError(f"sample.decoder is {weights}, but the codec rgb decodes nothing. Leave it out.")

    def packed(self) -> Packed:
        return Packed(packed_levels(self._levels))

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        return cls().build(None, packed.settings.get("levels"), torch.device("cpu"), torch.float32)
