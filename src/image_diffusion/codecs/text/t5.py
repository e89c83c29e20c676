"""The encoder of a T5 (Raffel et al. 2020), as Imagen and Stable Diffusion 3 read captions. Needs transformers."""

from __future__ import annotations

from typing import Literal

import torch

from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.codecs.text.transformer import load_text, mean_of_tokens
from image_diffusion.core.config import Config


class T5Text(Config):
    """Which T5."""

    type: Literal["t5"] = "t5"
    """A T5's encoder; a caption's embedding is the mean of its tokens."""
    weights: str = "google/t5-v1_1-base"
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """The encoder. Raises ValueError when the package or the weights are not at hand."""
        return load_text(self.type, self.weights, "T5EncoderModel", mean_of_tokens, device, num_tokens, None)
