"""Finite scalar quantisation: every channel is rounded to a few levels (Mentzer et al. 2024, appendix A.1).

All combinations of levels are the codebook. Nothing in it is learnt, so no token can die.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EPS = 1e-3
"""By which share of them what is rounded stays inside the outermost levels."""


class FiniteScalars(nn.Module):
    """The grid of tokens. levels: of each channel, 3 or more.

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
        """Values [B, D, h, w] -> their codes, with the gradient of what was rounded, float32, and the tokens [B, h, w].

        A value of 0 is in the middle of its channel: the shift makes up for the half by which an even number of levels
        lies lower.
        """
        bounded = torch.tanh(values.float() + self.shift) * self.reach - self.offset
        level = bounded.round()
        tokens = ((level + self.middle).long() * self.strides).sum(1)
        return (bounded + (level - bounded).detach()) / self.middle, tokens
