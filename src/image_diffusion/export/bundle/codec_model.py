"""A discrete VAE in an exported folder: images -> tokens -> images."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.export.bundle.base import ExportedModel
from image_diffusion.networks.dvae import DVAE


class ExportedTokens(ExportedModel):
    """Encodes images to the most probable tokens, and decodes tokens."""

    def encode(self, images: Tensor) -> Tensor:
        """Uint8 [B, C, H, W] -> int64 [B, h, w]. Raises ValueError for images of another shape."""
        return cast("DVAE", self.network).indices(from_uint8(images.to(self.device)))

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] -> uint8 [B, C, H, W]."""
        network = cast("DVAE", self.network)
        return to_uint8(network.decode(network.hard_latent(tokens.to(self.device).long()))).cpu()
