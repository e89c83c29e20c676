"""The text tower of a SigLIP (Zhai et al. 2023), which reads 64 tokens whatever the caption. Needs transformers."""

from __future__ import annotations

from typing import Literal

import torch

from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.codecs.text.transformer import load_text, pooled
from image_diffusion.core.config import Config


class SiglipText(Config):
    """Which SigLIP."""

    type: Literal["siglip"] = "siglip"
    """A SigLIP's text tower: 64 tokens."""
    weights: str = "google/siglip-base-patch16-224"
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """The encoder. Raises ValueError when the package or the weights are not at hand."""
        return load_text(self.type, self.weights, "SiglipTextModel", pooled, device, num_tokens, 64)
