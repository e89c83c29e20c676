"""Predict each token from the tokens before it: the cross-entropy, in bits (Ramesh et al. 2021, section 2.2)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
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
