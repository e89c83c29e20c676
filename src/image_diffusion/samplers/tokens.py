"""Samplers of tokens: truncated probabilities, draws from the streams of each image, guidance of logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams, at_step


class TokenSampler(Config, ABC):
    """Method that draws a token from the network's prediction of it."""

    temperature: float = Field(1.0, ge=1e-30)
    """Divisor of the logits: below 1, probable tokens become more probable."""
    top_k: int | None = Field(None, ge=1)
    """Number of most probable tokens to draw from; unset: all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw from the fewest tokens whose probabilities sum to this (nucleus sampling); unset: from all."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits [..., K]: float64 [..., K], which sum to 1."""
        return cut(logits.double() / self.temperature, self.top_k, self.top_p)

    @property
    @abstractmethod
    def calls(self) -> int:
        """Return the number of calls of the network with all tokens of an image, or the equivalent in time."""

    @abstractmethod
    def steps(self, predictor: Predictor, streams: Streams, places: int) -> Iterator[Tensor]:
        """Yield the tokens after each step, int64 [B, places]; hidden ones are K. streams: of the images."""


def cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the softmax of logits [..., K] over the most probable tokens: top_k of them, and of those the fewest whose
    probabilities sum to top_p (Holtzman et al. 2020, "The curious case of neural text degeneration", equations 2 and
    3). Tokens as probable as the last one of top_k are all kept."""
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    p = logits.softmax(-1)
    if top_p is None:
        return p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # the tokens before it suffice
    p = p.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
    return p / p.sum(-1, keepdim=True)


def drawn(p: Tensor, uniform: Tensor) -> Tensor:
    """Return tokens, int64 [...], by inverting the cumulative sums of probabilities [..., K] at numbers in [0, 1),
    [...]."""
    sums = p.cumsum(-1)
    return torch.searchsorted(sums, (uniform.double() * sums[..., -1])[..., None], right=True)[..., 0]


class Predictor:
    """A network of tokens with the conditions of a batch of images, and guidance. cond: the conditions, by name. null:
    the conditions that guidance leads away from; a condition that it does not name is kept. Logits are null +
    guidance_scale * (conditioned - null) (Ho & Salimans 2022, on logits as in Chang et al. 2023, "Muse", section 2.7).
    count: of images. hidden: the number that stands for a hidden token. device: of the network.
    """

    def __init__(
        self, network: Any, cond: Mapping[str, Tensor], null: Mapping[str, Tensor], guidance_scale: float, count: int
    ) -> None:
        self._network, self._scale, self.count = network, guidance_scale, count
        self.hidden = int(network.hidden)
        self.device: torch.device = next(network.parameters()).device
        self._cond = dict(cond)
        if guidance_scale != 1:
            self._cond = {
                name: torch.cat([x, null[name].to(x).expand_as(x) if name in null else x]) for name, x in cond.items()
            }
        self._past: Any = None

    def whole(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, N, K] of tokens [B, N]."""
        return self._guided(self._network(self._both(tokens), **self._cond))

    def begin(self) -> Tensor:
        """Return the logits of the first token, [B, K]."""
        logits, self._past = self._network.begin(**self._cond, count=self.count)
        return self._guided(logits)

    def next_logits(self, token: Tensor, place: int) -> Tensor:
        """Return the logits of the token after `token` [B], which stands at `place`: [B, K]."""
        return self._guided(self._network.next_logits(self._both(token), place, self._past))

    def _both(self, tokens: Tensor) -> Tensor:
        return tokens if self._scale == 1 else torch.cat([tokens, tokens])

    def _guided(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        if self._scale == 1:
            return logits
        conditional, null = logits.chunk(2)
        return null + self._scale * (conditional - null)


class Autoregressive(TokenSampler):
    """One token after the other."""

    type: Literal["autoregressive"] = "autoregressive"
    """One token after the other, for a network that was trained to predict the next token."""

    @property
    def calls(self) -> int:
        """Return 1: all tokens together cost as much as one call with all tokens."""
        return 1

    def steps(self, predictor: Predictor, streams: Streams, places: int) -> Iterator[Tensor]:
        """Yield the tokens so far, one more in each step, row by row (Ramesh et al. 2021)."""
        tokens = torch.full((predictor.count, places), predictor.hidden, device=predictor.device)
        logits = predictor.begin()
        for place in range(places):
            if place:
                logits = predictor.next_logits(tokens[:, place - 1], place - 1)
            token = drawn(self.probabilities(logits), at_step(streams, place).uniform("token"))
            tokens = tokens.clone()
            tokens[:, place] = token
            yield tokens


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
        """Yield the tokens after each step, fewer of them hidden in each (Chang et al. 2022, MaskGIT, section 3.2)."""
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
