"""LAMB (You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv:1904.00962).

RIN is trained with it: `config_diffusion_imagenet64.py` of the authors' repository, google-research/pix2seq.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.training.flat import Flat
from image_diffusion.training.optimizers.adam import MOMENTS
from image_diffusion.training.optimizers.flat import FlatOptimizer, OptimizerConfig, Probability, pieces


class Lamb(OptimizerConfig):
    """Adam's direction, as long for each parameter as the parameter itself, times the learning rate: for large
    batches."""

    needs_whole: ClassVar[bool] = True
    moves_each_alone: ClassVar[bool] = False

    type: Literal["lamb"] = "lamb"
    """Adam's update, scaled for each parameter to the norm of its weights."""
    lr: float = Field(2e-3, gt=0, le=10)
    """Learning rate, before the schedule: how far a parameter moves, as a share of its norm."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """Share of the weights that is added to the direction before it is scaled."""
    adapt_vectors: bool = False
    """Whether biases and gains, parameters of fewer than two dimensions, are scaled and decay as well. The authors'
    code leaves them out, the paper's algorithm does not."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        """The optimizer of these parameters. factors: of their learning rates, by name; unset: 1."""
        decay = self.weight_decay, self.weight_decay if self.adapt_vectors else 0.0
        cut = pieces(flat, factors, decay, alone=flat.parameters)
        settings = {"betas": self.betas, "eps": self.eps, "adapt_vectors": self.adapt_vectors}
        return FlatOptimizer(flat, cut, dict.fromkeys(MOMENTS, flat), self.lr, _Lamb, **settings)


class _Lamb(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, object]], **settings: Any) -> None:
        super().__init__(groups, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Algorithm 2, with phi(z) = z."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in group["params"]:
                g, m, v, t = x.grad, *(self.state[x][name] for name in (*MOMENTS, "step"))
                t.add_(1)
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt_() + group["eps"])
                u = r.add_(x, alpha=group["weight_decay"])
                adapts = group["is_matrix"] or group["adapt_vectors"]
                x.sub_(u * (group["lr"] * (_trust(x, u) if adapts else 1.0)))


def _trust(x: Tensor, u: Tensor) -> Tensor:
    """|x| / |u|, [] on the device; 1 where one of them is zero, so that what begins with zeros learns."""
    x_norm, u_norm = torch.linalg.vector_norm(x), torch.linalg.vector_norm(u)
    return torch.where((x_norm > 0) & (u_norm > 0), x_norm / u_norm, 1.0)
