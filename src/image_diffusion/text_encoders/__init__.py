"""Text encoders of captions: their interface, and the encoding of the empty caption, which all share. Each text encoder
has its own file and an entry in `TextEncoderConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.text_encoders.hashing import HashedText
from image_diffusion.text_encoders.pretrained import AutoText, ClipText, SiglipText, T5Text

_BATCH = 64  # captions per batch


class TextEncoder(Protocol):
    """Text encoder: captions -> embeddings.

    dim: of an embedding and of a token. num_tokens: number of token encodings per caption. identity: plain data that
    identifies the encoder.
    """

    dim: int
    num_tokens: int
    identity: dict[str, Any]

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Encode N captions -> [N, dim] and [N, num_tokens, dim], float32 on the CPU; rows of zeros after the last
        token."""
        ...


def encode_captions(encoder: TextEncoder, captions: list[str]) -> Tensor:
    """Encode N captions -> float32 [N, 1 + num_tokens, dim]: a caption's embedding, then its tokens.

    For every encoder, the empty caption is zeros: it is the condition when a caption is dropped, and the one that
    guidance leads away from. Stable Diffusion XL's empty caption is zeros as well (`force_zeros_for_empty_prompt` of
    its pipeline in diffusers).
    """
    embeddings = torch.zeros(len(captions), 1 + encoder.num_tokens, encoder.dim)
    with_words = [row for row, caption in enumerate(captions) if caption.strip()]
    for start in range(0, len(with_words), _BATCH):
        rows = with_words[start : start + _BATCH]
        embedded, tokens = encoder([captions[row] for row in rows])
        embeddings[rows] = torch.cat([embedded[:, None], tokens], dim=1)
    return embeddings


TextEncoderConfig = Annotated[HashedText | ClipText | SiglipText | T5Text | AutoText, Field(discriminator="type")]


def encoder_of(pairs: Mapping[str, Any], device: torch.device) -> TextEncoder:
    """Rebuild the text encoder that encoded the captions. pairs: from their manifest.

    Raises ValueError if the loaded encoder has another identity.
    """
    config = parse(TextEncoderConfig, pairs["encoder"], "model.json: pairs: encoder")
    encoder: TextEncoder = config.build(device, pairs["num_tokens"])
    if encoder.identity != pairs["text"]:
        raise ValueError(
            f"The captions were encoded by {pairs['text']}, but the text encoder is now {encoder.identity}. Restore "
            f"the one that encoded them, or train again."
        )
    return encoder
