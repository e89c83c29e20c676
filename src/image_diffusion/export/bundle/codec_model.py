"""A discrete VAE in an exported folder: images -> tokens -> images."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from image_diffusion.codecs.base import to_images, to_x
from image_diffusion.core.pictures import as_pictures
from image_diffusion.export.bundle.base import ExportedModel
from image_diffusion.networks.dvae import DVAE


class ExportedTokens(ExportedModel):
    """Encodes images to the most probable tokens, and decodes tokens."""

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] -> int64 [B, h, w]. Raises ValueError for images of another shape."""
        return cast("DVAE", self.network).indices(to_x(images.to(self.device), self.spec.levels))

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] -> images [B, C, H, W]."""
        network = cast("DVAE", self.network)
        return to_images(network.decode(network.hard_latent(tokens.to(self.device).long())), self.spec.levels).cpu()

    def pictures(self, images: Tensor) -> Tensor:
        """Return images as pictures, uint8 [N, C, H, W]; arrays in grey, RGB or false colours."""
        return as_pictures(self.spec.shown(images))
