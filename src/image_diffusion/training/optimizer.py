"""Adam and AdamW over a network's parameters laid end to end."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config import Config
from image_diffusion.training.flat import Flat

Probability = Annotated[float, Field(ge=0, lt=1)]


class _AdamBase(Config):
    lr: float = Field(1e-4, gt=0, le=10)
    """Learning rate, before the schedule."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the root of the second moment."""


class AdamW(_AdamBase):
    """Adam with weight decay apart from the gradient (Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Share of the weights, times the learning rate, that is taken away in each step."""
    decay_vectors: bool = False
    """Whether biases and gains, parameters of fewer than two dimensions, decay as well."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatAdam:
        """The optimizer of these parameters. factors: of their learning rates, by name; unset: 1."""
        vectors = self.weight_decay if self.decay_vectors else 0.0
        return FlatAdam(flat, torch.optim.AdamW, self, (self.weight_decay, vectors), factors)


class Adam(_AdamBase):
    """Adam (Kingma and Ba 2015), without weight decay."""

    type: Literal["adam"] = "adam"
    """Adam, without weight decay."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatAdam:
        """The optimizer of these parameters. factors: of their learning rates, by name; unset: 1."""
        return FlatAdam(flat, torch.optim.Adam, self, (0.0, 0.0), factors)


Optimizer = Annotated[AdamW | Adam, Field(discriminator="type")]


class FlatAdam:
    """PyTorch's fused Adam on two vectors: the matrices and, with their own decay, the rest; each in as many parts as
    the rates of neighbouring parameters differ.

    moments: by name, vectors of the flat layout. steps: float32, updates of each part, on the device.
    """

    def __init__(
        self,
        flat: Flat,
        kind: type[torch.optim.Adam],
        config: _AdamBase,
        decay: tuple[float, float],
        factors: Mapping[str, float] | None,
    ) -> None:
        self._lr = config.lr
        self.moments = {name: torch.zeros_like(flat.values) for name in ("exp_avg", "exp_avg_sq")}
        factors = factors or {slot.name: 1.0 for slot in flat.slots}
        cuts = {b.start for a, b in pairwise(flat.slots) if factors[a.name] != factors[b.name]}
        ends = sorted([0, flat.matrices_end, flat.size, *(cuts - {flat.matrices_end})])
        factor_at = {slot.start: factors[slot.name] for slot in flat.slots}
        self.steps = torch.zeros(len(ends) - 1, device=flat.values.device)
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, Any] = {}
        for i, (start, stop) in enumerate(pairwise(ends)):
            if start == stop:
                continue
            part = nn.Parameter(flat.values[start:stop])
            part.grad = flat.gradient[start:stop]
            decays = decay[start >= flat.matrices_end]
            groups.append({"params": [part], "weight_decay": decays, "factor": factor_at[start]})
            moments = {name: vector[start:stop] for name, vector in self.moments.items()}
            states[part] = {"step": self.steps[i], **moments}
        self.torch = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.torch.state.update(states)

    def set_rate(self, factor: float) -> float:
        """Set the learning rate of the next update to a multiple of the configured one, and return it: that of
        parameters with a factor of 1."""
        for group in self.torch.param_groups:
            group["lr"] = self._lr * factor * group["factor"]
        return self._lr * factor

    def vectors(self) -> dict[str, Tensor]:
        """What has to be kept, apart from `steps`."""
        return self.moments
