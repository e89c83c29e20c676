"""Sampler of tokens one after the other, row by row (Ramesh et al. 2021). Keys and values of earlier tokens are
kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.samplers.image_noise import at_step
from image_diffusion.samplers.tokens.base import Predictor, TokenSampler, drawn


class Autoregressive(TokenSampler):
    """One token after the other."""

    type: Literal["autoregressive"] = "autoregressive"
    """One token after the other, for a network that was trained to predict the next token."""

    @property
    def calls(self) -> int:
        """Return 1: all tokens together cost as much as one call with all tokens."""
        return 1

    def steps(self, predictor: Predictor, streams: Streams, places: int) -> Iterator[Tensor]:
        """Yield the tokens so far, one more in each step."""
        tokens = torch.full((predictor.count, places), predictor.hidden, device=predictor.device)
        logits = predictor.begin()
        for place in range(places):
            if place:
                logits = predictor.next_logits(tokens[:, place - 1], place - 1)
            token = drawn(self.probabilities(logits), at_step(streams, place).uniform("token"))
            tokens = tokens.clone()
            tokens[:, place] = token
            yield tokens
