"""Parallel decoding: all hidden tokens are drawn at once, and the most probable are kept (Chang et al. 2022, MaskGIT,
section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.samplers.image_noise import at_step
from image_diffusion.samplers.tokens.base import Predictor, TokenSampler, drawn


class Masked(TokenSampler):
    """Many tokens in each step: all hidden tokens are drawn, and the least probable are hidden again."""

    type: Literal["masked"] = "masked"
    """Many tokens in each step, for a network that was trained to predict hidden tokens."""
    num_steps: int = Field(8, ge=1)
    """Number of steps; not more than the number of tokens."""
    confidence_noise: float = Field(4.5, ge=0)
    """Randomness in which tokens are kept: factor of the Gumbel noise added to the logarithm of a token's probability;
    it falls to 0 with the steps. 0: the most probable tokens are kept, and the images are similar."""

    @property
    def calls(self) -> int:
        return self.num_steps

    def steps(self, predictor: Predictor, streams: Streams, places: int) -> Iterator[Tensor]:
        """Yield the tokens after each step, fewer of them hidden in each."""
        tokens = torch.full((predictor.count, places), predictor.hidden, device=predictor.device)
        hidden = torch.ones_like(tokens, dtype=torch.bool)
        for step, still_hidden in enumerate(hidden_counts(places, self.num_steps)):
            p, now = self.probabilities(predictor.whole(tokens)), at_step(streams, step)
            sampled = drawn(p, now.uniform("token", (places,)))
            tokens = torch.where(hidden, sampled, tokens)
            chance = self.confidence_noise * (1 - (step + 1) / self.num_steps)
            sure = p.gather(2, sampled[..., None])[..., 0].log() + chance * now.gumbel("confidence", (places,))
            sure = sure.masked_fill(~hidden, torch.inf)  # known tokens are kept
            places_in_order = sure.argsort(dim=1, stable=True).argsort(dim=1)
            hidden = places_in_order < still_hidden
            tokens = tokens.masked_fill(hidden, predictor.hidden)
            yield tokens


def hidden_counts(places: int, num_steps: int) -> list[int]:
    """Return the number of tokens that are still hidden after each step: a share cos(pi i / 2 T) after step i of T, at
    least one less than before, and none in the end. Raises ValueError for more steps than tokens."""
    if num_steps > places:
        raise ValueError(f"There are {num_steps} steps, but only {places} tokens. Use at most {places} steps.")
    counts, before = [], places
    for step in range(1, num_steps + 1):
        share = math.floor(places * math.cos(math.pi / 2 * step / num_steps))
        before = min(max(share, num_steps - step), before - 1)  # one for each remaining step
        counts.append(before)
    return counts
