"""A text encoder without language: every word, and every pair of adjacent words, is a fixed random direction.

It provides pairs of image and caption without any download, for demos and tests. Equal captions have equal embeddings,
and captions that share words are nearer to one another. It knows no synonyms, and shares no space with images.
(Weinberger et al. 2009, "Feature hashing", with Gaussian directions.)
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams

_SEED = 0
VERSION = 1
"""Version in the identity: increase it when the embeddings change."""


class HashedText(Config):
    """Hashing encoder: a fixed random direction for every word and every pair of adjacent words."""

    type: Literal["hashed"] = "hashed"
    """Fixed random directions: no download, no language."""
    dim: int = Field(128, ge=8)
    """Dimension of an embedding."""

    def build(self, device: torch.device, num_tokens: int) -> HashingText:
        """Build the encoder. device: ignored, since the computation is trivial."""
        return HashingText(self.dim, num_tokens, context=True)


class HashingText:
    """Text encoder of captions -> embeddings of norm 1. dim: their dimension. num_tokens: number of word encodings per
    caption. context: the encoding of a word also depends on the previous word, as "in blue" is not "on blue"."""

    def __init__(self, dim: int, num_tokens: int = 0, context: bool = False) -> None:
        self.dim, self.num_tokens, self._context = dim, num_tokens, context
        self.identity: dict[str, Any] = {"type": "hashing", "version": VERSION, "dim": dim, "num_tokens": num_tokens}
        if context:
            self.identity["context"] = True

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Encode N captions -> text embeddings float32 [N, dim], and encodings [N, num_tokens, dim]: one a word, rows
        of zeros after the last, words past the last row left out. A caption without any word is zeros."""
        texts, tokens = torch.zeros(len(captions), self.dim), torch.zeros(len(captions), self.num_tokens, self.dim)
        for i, caption in enumerate(captions):
            words = words_of(caption)
            if not words:
                continue
            directions = self._directions(words)  # [number of words, dim]
            both = self._directions([" ".join(pair) for pair in pairwise(words)])
            texts[i] = F.normalize(directions.sum(0) + both.sum(0), dim=0)
            shown = min(len(words), self.num_tokens)
            if self._context:
                directions[1:] += both
            tokens[i, :shown] = F.normalize(directions[:shown], dim=1)
        return texts, tokens

    def _directions(self, words: list[str]) -> Tensor:
        """Return standard normal numbers [number of words, dim], a function of only the words."""
        keys = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little", signed=True) for word in words]
        sample = torch.tensor(keys, dtype=torch.int64)
        return Streams(_SEED, torch.zeros_like(sample), sample).normal("word", (self.dim,))


def words_of(caption: str) -> list[str]:
    """Return the words of a caption in lower case, in their order."""
    return re.findall(r"\w+", caption.lower())
