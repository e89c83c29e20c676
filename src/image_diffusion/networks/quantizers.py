"""Quantisers of encodings: vector quantisation and finite scalar quantisation.

In vector quantisation the token of an encoding is its nearest code, and a code is the moving average of its encodings
(van den Oord et al. 2017, "Neural discrete representation learning", arXiv:1711.00937, appendix A.1).

Codes that are rarely used are reset to an encoding of the batch, as in Jukebox (Dhariwal et al. 2020, arXiv:2005.00341,
"random restarts") and SoundStream (Zeghidour et al. 2021, arXiv:2107.03312, section III-C).

In finite scalar quantisation every channel is rounded to a few levels (Mentzer et al. 2024, appendix A.1). The codebook
consists of all combinations of levels. It is not learned, so no code can become unused.
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
    """Update rule of the codes."""

    decay: float = Field(0.99, gt=0, lt=1)
    """Decay of the moving averages: gamma of the paper's appendix."""
    dead_below: float = Field(0.05, ge=0, lt=1)
    """Reset a code to a random encoding of the batch if its moving count is below this share of the mean over the
    codes. 0: never."""


class VectorQuantiser(nn.Module):
    """Codebook of vector quantisation. weight: the codes, [num_embeddings, D]. counts: moving averages of the uses of
    each code in a batch, [num_embeddings], initially 0, so that the first encodings replace a code. Both are updated by
    `update_from` and have no gradient.
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
            distance = weight.square().sum(1) - 2 * values.movedim(1, -1) @ weight.T  # without the square of the value
            tokens = distance.argmin(-1)
        codes = F.embedding(tokens, weight).movedim(-1, 1)
        return values + (codes - values).detach(), tokens

    @torch.no_grad()
    def update_from(self, tokens: Tensor, encodings: Tensor, draws: Tensor) -> None:
        """Update the codes from a global batch. tokens: [M] of encodings [M, D]. draws: uniform [M], the order in which
        encodings replace unused codes.

        N <- gamma N + (1 - gamma) n and m <- gamma m + (1 - gamma) sum z, with code e = m / N (appendix A.1). m = N e
        need not be stored: e <- e + (1 - gamma) (sum z - n e) / N.
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
        self.counts.copy_(torch.where(revived, mean, self.counts))  # the mean count: time to be used


_EPS = 1e-3
"""Share of the range by which values before rounding are kept inside the outermost levels."""


class FiniteScalars(nn.Module):
    """Codebook of finite scalar quantisation. levels: number of levels of each channel, 3 or more. weight: the codes,
    [num_embeddings, D] in [-1, 1]; token sum_d (L_1 … L_{d-1}) l_d has level l_d in channel d.
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
        # Constants, with contents even if the network is built on the meta device.
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

        A value of 0 maps to the middle of its channel: the shift compensates for the half by which an even number of
        levels is lower.
        """
        bounded = torch.tanh(values.float() + self.shift) * self.reach - self.offset
        level = bounded.round()
        tokens = ((level + self.middle).long() * self.strides).sum(1)
        return (bounded + (level - bounded).detach()) / self.middle, tokens
