"""Objectives of token transformers: predict masked tokens from the others (Chang et al. 2022, MaskGIT, equation 1), or
each token from the tokens before it (Ramesh et al. 2021, section 2.2). Both losses are cross-entropies in bits."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective
from image_diffusion.objectives.label_dropout import LabelDropout


class NextToken(Config):
    """Each token from the tokens before it, row by row."""

    type: Literal["autoregressive"] = "autoregressive"
    """Each token from the tokens before it."""
    label_drop_probability: float = Field(0.1, ge=0, le=1)
    """Probability that a class or caption, if the data have any, is dropped, for guidance."""

    causal: ClassVar[bool] = True
    """True if the network sees only the tokens before each token."""

    def build(self, spec: DataSpec) -> NextTokenObjective:
        """Return the objective for tokens of `spec`."""
        return NextTokenObjective(LabelDropout(self.label_drop_probability, spec))


class NextTokenObjective(Objective):
    """Objective on tokens x int64 [B, N]: mean bits per token. Parts: "bits", the same; "accuracy", of the most
    probable tokens."""

    def __init__(self, drop_labels: LabelDropout) -> None:
        self._drop_labels = drop_labels

    def __call__(self, network: Any, batch: Batch) -> Losses:
        logits = network(batch.x, **self._drop_labels(batch, network))
        bits = bits_of(logits, batch.x).mean(1)
        accuracy = (logits.detach().argmax(2) == batch.x).float().mean(1)
        return Losses(bits, {"bits": bits.detach(), "accuracy": accuracy})


def bits_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return -log2 p of each token. logits: [B, N, K]; tokens: int64 [B, N]. Float32 [B, N]."""
    nats = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    return nats.view_as(tokens) / math.log(2)


class MaskedTokens(Config):
    """Predict masked tokens from all others; the number of masked tokens is drawn for each image."""

    type: Literal["masked"] = "masked"
    """Masked tokens from all others."""
    label_drop_probability: float = Field(0.1, ge=0, le=1)
    """Probability that a class or caption, if the data have any, is dropped, for guidance."""

    causal: ClassVar[bool] = False
    """True if the network sees only the tokens before each token."""

    def build(self, spec: DataSpec) -> MaskedTokensObjective:
        """Return the objective for tokens of `spec`."""
        return MaskedTokensObjective(LabelDropout(self.label_drop_probability, spec))


class MaskedTokensObjective(Objective):
    """Objective on tokens x int64 [B, N]: mean bits per masked token of each image. Parts: "bits", the same;
    "accuracy", of the most probable tokens. A share cos(pi r / 2) of the tokens is masked, r uniform in [0, 1): the
    cosine schedule of section 3.3.
    """

    def __init__(self, drop_labels: LabelDropout) -> None:
        self._drop_labels = drop_labels

    def __call__(self, network: Any, batch: Batch) -> Losses:
        ratio, places = batch.streams.uniform("mask_ratio"), batch.x.shape[1]
        hidden = hide(batch.streams, torch.ceil(torch.cos(math.pi / 2 * ratio) * places).long(), places)
        bits, accuracy = hidden_bits(network, batch.x, hidden, self._drop_labels(batch, network))
        return Losses(bits, {"bits": bits.detach(), "accuracy": accuracy}, ratio)


def hide(streams: Streams, count: Tensor, places: int) -> Tensor:
    """Draw the masked tokens of each image uniformly: `count` tokens, int64 [B], at least 1. Bool [B, places]."""
    rank = streams.uniform("mask_order", (places,)).argsort(dim=1, stable=True).argsort(dim=1)
    return rank < count.clamp(1, places)[:, None]


def hidden_bits(network: Any, tokens: Tensor, hidden: Tensor, cond: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean of -log2 p over the masked tokens of each image, and the share of masked tokens that are the most
    probable, [B] each.

    tokens: int64 [B, N]; hidden: bool [B, N].
    """
    logits = network(torch.where(hidden, network.hidden, tokens), **cond)
    count = hidden.sum(1)
    right = (logits.detach().argmax(2) == tokens) & hidden
    return (bits_of(logits, tokens) * hidden).sum(1) / count, right.sum(1) / count
