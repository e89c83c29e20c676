"""What a text encoder is, and the empty caption that all of them share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_BATCH = 64  # captions encoded at a time


class TextEncoder(Protocol):
    """Captions -> embeddings.

    dim: of an embedding and of a token. num_tokens: encodings given of the tokens of a caption. identity: plain data
    that tells it from every other encoder.
    """

    dim: int
    num_tokens: int
    identity: dict[str, Any]

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """N captions -> [N, dim] and [N, num_tokens, dim], float32 on the CPU; rows of zeros after the last token."""
        ...


def encode_captions(encoder: TextEncoder, captions: list[str]) -> Tensor:
    """N captions -> float32 [N, 1 + num_tokens, dim]: a caption's embedding, then its tokens.

    The empty caption is zeros, whatever the encoder: what a network is told where a caption was dropped, and what
    guidance leads away from. Stable Diffusion XL's empty caption is zeros as well (`force_zeros_for_empty_prompt` of
    its pipeline in diffusers).
    """
    found = torch.zeros(len(captions), 1 + encoder.num_tokens, encoder.dim)
    said = [row for row, caption in enumerate(captions) if caption.strip()]
    for start in range(0, len(said), _BATCH):
        rows = said[start : start + _BATCH]
        embedded, tokens = encoder([captions[row] for row in rows])
        found[rows] = torch.cat([embedded[:, None], tokens], dim=1)
    return found
