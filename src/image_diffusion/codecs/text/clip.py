"""The text tower of a CLIP (Radford et al. 2021). Needs the package transformers and the weights."""

from __future__ import annotations

from typing import Literal

import torch

from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.codecs.text.transformer import load_text, pooled
from image_diffusion.core.config import Config


class ClipText(Config):
    """Which CLIP."""

    type: Literal["clip"] = "clip"
    """A CLIP's text tower: 77 tokens."""
    weights: str = "openai/clip-vit-large-patch14"
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """The encoder. Raises ValueError when the package or the weights are not at hand."""
        return load_text(self.type, self.weights, "CLIPTextModel", pooled, device, num_tokens, 77)
