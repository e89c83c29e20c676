"""Any language model that transformers loads as an `AutoModel`: its last hidden states."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.codecs.text.transformer import load_text, mean_of_tokens
from image_diffusion.core.config import Config


class AutoText(Config):
    """Which model."""

    type: Literal["auto"] = "auto"
    """Any AutoModel; a caption's embedding is the mean of its tokens."""
    weights: str = Field(min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """The encoder. Raises ValueError when the package or the weights are not at hand."""
        return load_text(self.type, self.weights, "AutoModel", mean_of_tokens, device, num_tokens, None)
