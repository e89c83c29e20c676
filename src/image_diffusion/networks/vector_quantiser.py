"""Vector quantisation: the token of an encoding is its nearest code, a code the moving average of the encodings that
chose it (van den Oord et al. 2017, "Neural discrete representation learning", arXiv:1711.00937, appendix A.1).

Codes that are hardly chosen any more begin anew on an encoding of the batch, as in Jukebox (Dhariwal et al. 2020,
arXiv:2005.00341, "random restarts") and SoundStream (Zeghidour et al. 2021, arXiv:2107.03312, section III-C).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config import Config


class VectorQuantiserConfig(Config):
    """How codes follow the encodings that choose them."""

    decay: float = Field(0.99, gt=0, lt=1)
    """How much of the moving averages stays in each step: gamma of the paper's appendix."""
    dead_below: float = Field(0.05, ge=0, lt=1)
    """A code is dead when its moving count is below this share of the mean over the codes; it then begins anew on an
    encoding of the batch, drawn by chance. 0: the dead stay dead."""


class VectorQuantiser(nn.Module):
    """The codebook. weight: the codes, [num_embeddings, D]. counts: how often each is chosen in a batch, moving
    averages [num_embeddings] that begin at 0, so that the first encodings move a code all the way.

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
        """Values [B, D, h, w] -> their nearest codes, with the gradient of the values, and the tokens [B, h, w]."""
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
