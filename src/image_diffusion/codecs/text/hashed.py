"""A text encoder that needs no download and knows no language (`codecs.hashing`): for demos and tests."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from image_diffusion.codecs.hashing import HashingText
from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.core.config import Config


class HashedText(Config):
    """Every word, and every two words side by side, is a fixed random direction."""

    type: Literal["hashed"] = "hashed"
    """Fixed random directions: no download, no language."""
    dim: int = Field(128, ge=8)
    """Dimension of an embedding."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """The encoder. device: of no consequence, there is next to nothing to compute."""
        return HashingText(self.dim, num_tokens, context=True)
