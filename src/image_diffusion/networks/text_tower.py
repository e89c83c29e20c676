"""Text tower of a small CLIP: a transformer over the words of a caption.

As in Radford et al. 2021 (arXiv:2103.00020, section 2.4), the output is normalised and projected linearly into the
space that images share. Unlike in CLIP, tokens are whole words, each attends to all others, and their mean is
projected.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from image_diffusion.networks.token_transformer import Block

_DEPTH, _HEADS, _RATIO = 2, 4, 2


class TextTower(nn.Module):
    """Words int64 [B, L], 1 … num_words, at least one, padded with 0 -> a caption's embedding [B, dim], and the
    encodings of its words [B, L, dim], padded with zeros. length: the largest L. dim: divisible by 4."""

    def __init__(self, num_words: int, length: int, dim: int) -> None:
        super().__init__()
        self.length = length
        self.words = nn.Embedding(num_words + 1, dim)
        self.places = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, _HEADS, _RATIO * dim, dropout=0.0) for _ in range(_DEPTH))
        self.norm = nn.LayerNorm(dim)
        self.projection = nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        said = words > 0  # [B, L]
        x = self.words(words) + self.places[: words.shape[1]]
        for block in self.blocks:
            x = block(x, said)
        x = self.norm(x) * said[..., None]
        return self.projection(x.sum(1) / said.sum(1, keepdim=True)), x
