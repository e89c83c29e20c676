"""Adam and AdamW, through PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field

from image_diffusion.training.optim.base import FlatOptimizer, Kind, OptimizerConfig, Piece, Probability, pieces
from image_diffusion.training.parallel.flat_parameters import Flat

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBase(OptimizerConfig):
    """Settings that all variants of Adam share."""

    lr: float = Field(1e-4, gt=0, le=10)
    """Learning rate, before the schedule."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the root of the second moment."""

    def _fused(self, kind: Kind, flat: Flat, cut: Sequence[Piece]) -> FlatOptimizer:
        moments = dict.fromkeys(MOMENTS, flat)
        return FlatOptimizer(flat, cut, moments, self.lr, kind, betas=self.betas, eps=self.eps, fused=True)


class AdamW(AdamBase):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay: each step subtracts this share of the weights, times the learning rate."""
    decay_vectors: bool = False
    """Also apply the weight decay to biases and gains."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        return self._fused(torch.optim.AdamW, flat, pieces(flat, factors, self.weight_decay, self.decay_vectors))


class Adam(AdamBase):
    """Adam (Kingma and Ba 2015), without weight decay."""

    type: Literal["adam"] = "adam"
    """Adam, without weight decay."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        return self._fused(torch.optim.Adam, flat, pieces(flat, factors))
