"""What a codec is: pixels <-> the space a network works in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from image_diffusion.core.streams import Streams

_PIXELS_AT_ONCE = 2**20


class LatentShape(Protocol):
    """What of an autoencoder's configuration decides the shape of its latents."""

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        ...

    @property
    def downsampling(self) -> int:
        """Pixels along an edge of the image for each element along an edge of the latent."""
        ...


class Codec(Protocol):
    """Turns images into what a network is trained on, and samples back into images.

    An image is encoded once, to moments, which are stored; `draw` turns what was stored into x each time it is read,
    so that posterior noise is new in every epoch. The scale of a latent is applied in `draw` and `decode` only.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data that tells this codec from every other: latents of another identity are never used with it."""
        ...

    @property
    def scale(self) -> float:
        """What a latent is multiplied with to become x; 1 for pixels."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether x lies in [-1, 1], as pixels do: then samplers hold what they predict of it there."""
        ...

    def compile_encoder(self) -> None:
        """Make `encode` faster with torch.compile, after the minutes that this takes."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Uint8 [B, C, H, W] -> float32 [B, 2, c, h, w]: mean and standard deviation, not scaled."""
        ...

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        """What the shards hold -> x, float32 [B, c, h, w]."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """X, float32 [B, c, h, w] -> uint8 images [B, C, H, W]."""
        ...


def in_slices(decode: Callable[[Tensor], Tensor], latent: Tensor, pixels: int) -> Tensor:
    """Decode a batch [B, c, h, w] so many images at once as have some million pixels together: a float32 autoencoder of
    Stable Diffusion's size takes some 3 GiB for those. pixels: of one image."""
    return torch.cat([decode(part) for part in latent.split(max(1, _PIXELS_AT_ONCE // pixels))])


def to_uint8(x: Tensor) -> Tensor:
    """Pixels in [-1, 1] -> uint8, rounded to nearest: clamp(127.5 x + 128), truncated, as DiT does."""
    return (127.5 * x.float() + 128.0).clamp(0, 255).to(torch.uint8)


def from_uint8(images: Tensor) -> Tensor:
    """Uint8 pixels -> float32 in [-1, 1]."""
    return images.to(torch.float32) / 127.5 - 1.0
