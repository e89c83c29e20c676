"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field

from image_diffusion.training.optim.base import FlatOptimizer, OptimizerConfig, Probability, pieces
from image_diffusion.training.parallel.flat_parameters import Flat


class Lion(OptimizerConfig):
    """Lion: each weight moves by the learning rate in the direction of the sign of its mean gradient, with one moment
    instead of two. The authors recommend rates 3 to 10 times smaller than those of AdamW, and a weight decay larger by
    the same factor (section 5).
    """

    type: Literal["lion"] = "lion"
    """The sign of an interpolation between gradient and momentum."""
    lr: float = Field(1e-5, gt=0, le=10)
    """Learning rate, before the schedule: the distance that every weight moves. About a tenth of AdamW's."""
    betas: tuple[Probability, Probability] = (0.9, 0.99)
    """Weight of the momentum in an update, and decay of the momentum."""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """Decoupled weight decay: each step subtracts this share of the weights, times the learning rate."""
    decay_vectors: bool = False
    """Also apply the weight decay to biases and gains."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        cut = pieces(flat, factors, self.weight_decay, self.decay_vectors)
        return FlatOptimizer(flat, cut, {"exp_avg": flat}, self.lr, _Lion, betas=self.betas)


class _Lion(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Algorithm 2."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            eta, lambda_ = group["lr"], group["weight_decay"]
            for theta in group["params"]:
                g, m = theta.grad, self.state[theta]["exp_avg"]
                c = torch.lerp(g, m, beta1)
                theta.mul_(1 - eta * lambda_).sub_(c.sign_(), alpha=eta)
                m.lerp_(g, 1 - beta2)
