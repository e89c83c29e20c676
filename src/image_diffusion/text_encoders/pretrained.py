"""Text encoders of the package transformers, by the name or the folder of their weights."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from image_diffusion.core.config.base import Config
from image_diffusion.text_encoders.base import TextEncoder
from image_diffusion.text_encoders.transformers import Pool, load_text, mean_of_tokens, pooled


class PretrainedText(Config):
    """A text encoder that transformers loads. A subclass names the model class and how a caption is pooled."""

    type: str
    weights: str = Field(min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    model_class: ClassVar[str]
    """Class of transformers."""
    pool: ClassVar[Pool]
    """Hidden states to one embedding per caption."""
    max_length: ClassVar[int | None] = None
    """Tokens that the model always reads; None: as many as are stored."""

    def build(self, device: torch.device, num_tokens: int) -> TextEncoder:
        """Load the encoder. Raises ValueError when the package or the weights are not available."""
        kind = type(self)
        return load_text(self.type, self.weights, kind.model_class, kind.pool, device, num_tokens, kind.max_length)


class ClipText(PretrainedText):
    """Text tower of a CLIP (Radford et al. 2021)."""

    type: Literal["clip"] = "clip"
    """A CLIP's text tower: 77 tokens."""
    weights: str = Field("openai/clip-vit-large-patch14", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "CLIPTextModel"
    pool: ClassVar[Pool] = staticmethod(pooled)
    max_length: ClassVar[int | None] = 77


class SiglipText(PretrainedText):
    """Text tower of a SigLIP (Zhai et al. 2023), which reads 64 tokens whatever the caption."""

    type: Literal["siglip"] = "siglip"
    """A SigLIP's text tower: 64 tokens."""
    weights: str = Field("google/siglip-base-patch16-224", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "SiglipTextModel"
    pool: ClassVar[Pool] = staticmethod(pooled)
    max_length: ClassVar[int | None] = 64


class T5Text(PretrainedText):
    """Encoder of a T5 (Raffel et al. 2020), as Imagen and Stable Diffusion 3 read captions."""

    type: Literal["t5"] = "t5"
    """A T5's encoder; a caption's embedding is the mean of its tokens."""
    weights: str = Field("google/t5-v1_1-base", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "T5EncoderModel"
    pool: ClassVar[Pool] = staticmethod(mean_of_tokens)


class AutoText(PretrainedText):
    """Any language model that transformers loads as an `AutoModel`: its last hidden states."""

    type: Literal["auto"] = "auto"
    """Any AutoModel; a caption's embedding is the mean of its tokens."""
    model_class: ClassVar[str] = "AutoModel"
    pool: ClassVar[Pool] = staticmethod(mean_of_tokens)
