"""Quantisers of encodings: vector quantisation and finite scalar quantisation.

In vector quantisation the token of an encoding is its nearest code, a code the moving average of the encodings that
chose it (van den Oord et al. 2017, "Neural discrete representation learning", arXiv:1711.00937, appendix A.1).

Codes that are hardly chosen any more begin anew on an encoding of the batch, as in Jukebox (Dhariwal et al. 2020,
arXiv:2005.00341, "random restarts") and SoundStream (Zeghidour et al. 2021, arXiv:2107.03312, section III-C).

In finite scalar quantisation every channel is rounded to a few levels (Mentzer et al. 2024, appendix A.1). All
combinations of levels are the codebook. Nothing in it is learnt, so no token can die.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config


class VectorQuantiserConfig(Config):
    """Update rule of the codes towards the encodings that choose them."""

    decay: float = Field(0.99, gt=0, lt=1)
    """Share of the moving averages that stays in each step: gamma of the paper's appendix."""
    dead_below: float = Field(0.05, ge=0, lt=1)
    """A code is dead when its moving count is below this share of the mean over the codes; it then begins anew on an
    encoding of the batch, drawn by chance. 0: the dead stay dead."""


class VectorQuantiser(nn.Module):
    """Codebook. weight: the codes, [num_embeddings, D]. counts: how often each is chosen in a batch, moving averages
    [num_embeddings] that begin at 0, so that the first encodings move a code all the way.

    Neither has a gradient: both learn by `take_in`.
    """

    weight: Tensor
    counts: Tensor

    def __init__(self, num_embeddings: int, dim: int, config: VectorQuantiserConfig) -> None:
        super().__init__()
        self.num_embeddings, self.config = num_embeddings, config
        self.register_buffer("weight", torch.randn(num_embeddings, dim))
        self.register_buffer("counts", torch.zeros(num_embeddings))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> their codes, [..., D]."""
        return F.embedding(tokens, self.weight)

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise values [B, D, h, w] -> their nearest codes, with the gradient of the values, and the tokens [B, h,
        w]."""
        weight = self.weight.to(values.dtype)
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            distance = weight.square().sum(1) - 2 * values.movedim(1, -1) @ weight.T  # less the square of the value
            tokens = distance.argmin(-1)
        codes = F.embedding(tokens, weight).movedim(-1, 1)
        return values + (codes - values).detach(), tokens

    @torch.no_grad()
    def take_in(self, tokens: Tensor, encodings: Tensor, draws: Tensor) -> None:
        """Learn from a global batch. tokens: [M] of encodings [M, D]. draws: uniform [M], an encoding's place in the
        queue of those that dead codes begin anew on.

        N <- gamma N + (1 - gamma) n and m <- gamma m + (1 - gamma) sum z, with code e = m / N (appendix A.1). As m is
        N e, it is not kept: e <- e + (1 - gamma) (sum z - n e) / N.
        """
        n = torch.zeros_like(self.counts).index_add_(0, tokens, torch.ones_like(draws).to(self.counts.dtype))
        sums = torch.zeros_like(self.weight).index_add_(0, tokens, encodings.to(self.weight.dtype))
        share = 1 - self.config.decay
        self.counts.lerp_(n, share)
        smallest = torch.finfo(self.counts.dtype).tiny
        moved = share * (sums - n.unsqueeze(1) * self.weight) / self.counts.clamp(min=smallest).unsqueeze(1)
        self.weight += moved
        mean = self.counts.mean()
        dead = self.counts < self.config.dead_below * mean
        place = dead.cumsum(0) - 1
        revived = dead & (place < len(encodings))
        chosen = draws.argsort(stable=True)[place.clamp(0, len(encodings) - 1)]
        self.weight.copy_(torch.where(revived.unsqueeze(1), encodings[chosen].to(self.weight.dtype), self.weight))
        self.counts.copy_(torch.where(revived, mean, self.counts))  # as often as any other: time to be chosen


_EPS = 1e-3
"""Share of the range by which rounded values stay inside the outermost levels."""


class FiniteScalars(nn.Module):
    """Grid of tokens. levels: of each channel, 3 or more.

    weight: the codes, [num_embeddings, D] in [-1, 1]; token sum_d (L_1 … L_{d-1}) l_d has level l_d in channel d.
    """

    weight: Tensor
    reach: Tensor
    offset: Tensor
    shift: Tensor
    middle: Tensor
    strides: Tensor

    def __init__(self, levels: Sequence[int]) -> None:
        super().__init__()
        self.num_embeddings = math.prod(levels)
        # Constants, so whole even where the network is built of shapes alone.
        count = torch.tensor(levels, device="cpu")
        strides = torch.tensor([math.prod(levels[:d]) for d in range(len(levels))], device="cpu")
        tokens = torch.arange(self.num_embeddings, device="cpu").unsqueeze(1)
        middle = count // 2
        self.register_buffer("weight", ((tokens // strides) % count - middle) / middle, persistent=False)
        reach = (count - 1) * (1 - _EPS) / 2
        offset = 0.5 * (count % 2 == 0)
        channelwise = {"reach": reach, "offset": offset, "shift": torch.atanh(offset / reach), "middle": middle}
        for name, values in {**channelwise, "strides": strides}.items():
            self.register_buffer(name, values.view(-1, 1, 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> their codes, [..., D]."""
        return F.embedding(tokens, self.weight)

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise values [B, D, h, w] -> their codes, with the gradient of the unrounded values, float32, and the
        tokens [B, h, w].

        A value of 0 is in the middle of its channel: the shift makes up for the half by which an even number of levels
        lies lower.
        """
        bounded = torch.tanh(values.float() + self.shift) * self.reach - self.offset
        level = bounded.round()
        tokens = ((level + self.middle).long() * self.strides).sum(1)
        return (bounded + (level - bounded).detach()) / self.middle, tokens
