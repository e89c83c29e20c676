"""Transformers over tokens: those of a discrete codec, with the condition as a prefix of tokens; and the words of a
caption, for the text tower of a small CLIP.

With causal attention the first is the second stage of DALL-E (Ramesh et al. 2021, arXiv:2102.12092, section 2.2): the
prediction of a token depends on the tokens before it, row by row. Without it, every token attends to every other, and
tokens may be masked: MaskGIT (Chang et al. 2022, arXiv:2202.04200, section 3.1). The default size is MaskGIT's. Norms
precede attention and MLP, as in DALL-E. The last layer is initialised with zeros, so that all tokens are equally
probable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import size_text
from image_diffusion.core.types import TEXT, DataSpec
from image_diffusion.nn.inputs import LabelEmbedder, TextEmbedder
from image_diffusion.nn.linear import Linear
from image_diffusion.nn.positions import check_rope, rotary_angles
from image_diffusion.nn.transformer import KeyValues, Mlp, SelfAttention


class TokenTransformerConfig(Config):
    """Size of the transformer."""

    depth: int = Field(24, gt=0)
    """Number of blocks."""
    width: int = Field(768, gt=0)
    """Channels of a token in the network. Divisible by the number of heads."""
    num_heads: int = Field(8, gt=0)
    """Attention heads of a block."""
    mlp_ratio: float = Field(4.0, gt=0, le=1e3)
    """Hidden channels of a block's MLP, as a multiple of the width."""
    rope: bool = False
    """Use rotary positions by row and column, in addition to the learned embedding of each position."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after attention and MLP."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be divisible by num_heads {self.num_heads}. Change one of them.")
        if self.rope:
            check_rope(self.width, self.num_heads)
        return self

    def build(self, spec: DataSpec, causal: bool = False) -> TokenTransformer:
        """Build the network for tokens of `spec`, whose channels are the size of the codebook; freshly initialised from
        torch's global generator."""
        return TokenTransformer(self, spec, causal)


@dataclass
class Past:
    """Cache of a causal network for the tokens so far. blocks: the caches of the blocks. prefix_mask: bool [B, P], true
    for tokens of the prefix that are present; None: all."""

    blocks: list[KeyValues]
    prefix_mask: Tensor | None


class TokenTransformer(nn.Module):
    """Tokens [B, N], row by row, and label or caption -> logits [B, N, K]. `hidden`, K, is the mask token."""

    def __init__(self, config: TokenTransformerConfig, spec: DataSpec, causal: bool) -> None:
        super().__init__()
        width = config.width
        self.config, self.spec, self.causal = config, spec, causal
        self.hidden = spec.channels
        self.x_embedder = nn.Embedding(spec.channels + (not causal), width)
        self.pos_embed = nn.Parameter(torch.empty(1, math.prod(spec.size), width))
        if TEXT in spec.conditions:
            self.text_embedder = TextEmbedder(spec.conditions[TEXT][-1], width)
        elif spec.num_classes:
            self.y_embedder = LabelEmbedder(spec.num_classes + 1, width)  # the last row stands for no label
        else:
            self.start = nn.Parameter(torch.empty(1, 1, width))
        hidden = round(width * config.mlp_ratio)
        self.blocks = nn.ModuleList(Block(width, config.num_heads, hidden, config.dropout) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, spec.channels)
        self._initialise()

    def forward(self, tokens: Tensor, /, label: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        """Tokens int64 [B, N], label int64 [B] (num_classes: no label), text float [B, 1 + L, dim] (zeros: none) ->
        logits [B, N, K]; in a causal network, of each token given the tokens before it. Raises ValueError if shapes or
        conditions do not fit the network.
        """
        self._check(tokens, label, text)
        prefix, prefix_mask = self._prefix(len(tokens), label, text)  # [B, P, D]
        count = tokens.shape[1] - self.causal
        x = self.x_embedder(tokens[:, :count]) + self.pos_embed[:, :count]
        x = torch.cat([prefix, x], 1)  # [B, P + N (- 1), D]
        P, M = prefix.shape[1], x.shape[1]
        mask = None if prefix_mask is None else F.pad(prefix_mask, (0, M - P), value=True)  # [B, M]
        mask = _before(M, mask, x.device) if self.causal else mask
        angles = self._angles(P, 0, count)
        for block in self.blocks:
            x = block(x, mask, angles)
        return self._logits(x[:, P - self.causal :])

    def begin(self, label: Tensor | None = None, text: Tensor | None = None, count: int = 1) -> tuple[Tensor, Past]:
        """Return the logits [B, K] of the first token of a causal network, and the cache that `next_logits` needs.
        count: B, for a network without conditions."""
        condition = label if label is not None else text
        prefix, prefix_mask = self._prefix(count if condition is None else len(condition), label, text)
        past = Past([KeyValues() for _ in self.blocks], prefix_mask)
        P = prefix.shape[1]
        x, mask, angles = prefix, _before(P, prefix_mask, prefix.device), self._angles(P, 0, 0)
        for block, cache in zip(self.blocks, past.blocks, strict=True):
            x = block(x, mask, angles, cache)
        return self._logits(x[:, -1]), past

    def next_logits(self, token: Tensor, place: int, past: Past) -> Tensor:
        """Return the logits [B, K] of the token after `token`, int64 [B], which is at position `place`."""
        x = (self.x_embedder(token) + self.pos_embed[:, place])[:, None]  # [B, 1, D]
        mask = None if past.prefix_mask is None else F.pad(past.prefix_mask, (0, place + 1), value=True)
        angles = self._angles(0, place, place + 1)
        for block, cache in zip(self.blocks, past.blocks, strict=True):
            x = block(x, mask, angles, cache)
        return self._logits(x[:, -1])

    def _check(self, tokens: Tensor, label: Tensor | None, text: Tensor | None) -> None:
        count = math.prod(self.spec.size)
        if tokens.ndim != 2 or tokens.shape[1] != count:
            raise ValueError(
                f"Tokens are {list(tokens.shape)}, but the network was built for {size_text(self.spec.resolution)} of "
                f"them, [B, {count}]. Use tokens of its own codec."
            )
        expected = {"text": hasattr(self, "text_embedder"), "label": hasattr(self, "y_embedder")}
        for (name, is_wanted), condition in zip(expected.items(), (text, label), strict=True):
            if is_wanted != (condition is not None):
                raise ValueError(
                    f"The network needs a {name} of each image. Pass it."
                    if is_wanted
                    else f"The network takes no {name}. Leave it out."
                )

    def _prefix(self, count: int, label: Tensor | None, text: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the prefix before the tokens, [B, P, D], and the mask of its present tokens, bool [B, P]; None:
        all."""
        if text is not None:
            embedding, words = self.text_embedder(text.to(self.pos_embed.dtype))  # [B, D], [B, L, D]
            is_word = F.pad(text[:, 1:].any(dim=2), (0, 1), value=True)
            return torch.cat([words, embedding[:, None]], 1), is_word  # always present: predicts the first token
        if label is not None:
            return self.y_embedder(label)[:, None], None
        return self.start.expand(count, -1, -1), None

    def _angles(self, prefix: int, first: int, end: int) -> Tensor | None:
        """Return rotation angles of the tokens from position `first` to `end`; those of a prefix are zero."""
        if not self.config.rope:
            return None
        all_ = rotary_angles(self.config.width // self.config.num_heads, self.spec.size, self.pos_embed.device)
        return F.pad(all_[first:end], (0, 0, prefix, 0))

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def _initialise(self) -> None:
        """Initialise every matrix and embedding by N(0, 0.02), biases and the last layer by zero."""
        for name, parameter in self.named_parameters():
            if name == "head.weight" or name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)


def _before(count: int, there: Tensor | None, device: torch.device) -> Tensor:
    """Return the causal mask, bool [B or 1, count, count]: each token attends to itself and those before it. there:
    bool [B, count], true for tokens that are present; None: all."""
    before = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
    if there is None:
        return before
    return before & there[:, None, :] | torch.eye(count, dtype=torch.bool, device=device)


class Block(nn.Module):
    """Pre-norm block of attention and MLP, each with a residual connection."""

    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), SelfAttention(width, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: KeyValues | None = None
    ) -> Tensor:
        """[B, M, D] -> [B, M, D]. mask, angles, cache: of `SelfAttention`."""
        x = x + self.dropout(self.attn(self.norm1(x), mask=mask, angles=angles, cache=cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


_DEPTH, _HEADS, _RATIO = 2, 4, 2  # of a text tower


class TextTower(nn.Module):
    """Words int64 [B, L], 1 … num_words, at least one, padded with 0 -> a caption's embedding [B, dim], and the
    encodings of its words [B, L, dim], padded with zeros. length: the largest L. dim: divisible by 4.

    As in Radford et al. 2021 (arXiv:2103.00020, section 2.4), the output is normalised and projected linearly into the
    space that images share. Unlike in CLIP, tokens are whole words, each attends to all others, and their mean is
    projected."""

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
