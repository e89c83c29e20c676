"""Running averages of the weights, several at once, each one operation on one vector."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config

Rate = Annotated[float, Field(ge=0, lt=1)]
Width = Annotated[float, Field(gt=0, lt=0.28)]


class Warmup(Config):
    """An average that follows the weights at first: decay(e) = 1 - (1 + e / inv_gamma)^-power (ema_pytorch 0.8)."""

    update_after_step: int = Field(100, ge=0)
    """Steps in which the average is a copy of the weights."""
    inv_gamma: float = Field(1.0, gt=0)
    """Steps in which the decay rises to 1 - 2^-power."""
    power: float = Field(2 / 3, gt=0, le=1)
    """How fast the decay rises towards its rate."""
    min_decay: float = Field(0.0, ge=0, lt=1)
    """The smallest decay."""

    def decay(self, step: int, rate: float) -> float:
        """The decay of update number `step`, counted from 1; 0 copies."""
        since = step - self.update_after_step - 1
        if since <= 0:
            return 0.0
        return min(max(1.0 - float((1.0 + since / self.inv_gamma) ** -self.power), self.min_decay), rate)


class ExponentialEma(Config):
    """ema <- rate ema + (1 - rate) weights."""

    type: Literal["exponential"] = "exponential"
    """Exponential averages."""
    rates: tuple[Rate, ...] = (0.9999,)
    """One average for each; the first is the one that is written as the weights. None: no average."""
    warmup: Warmup | None = None
    """Let the averages follow the weights at first; unset: `rate` from the first step."""
    update_every: int = Field(1, gt=0)
    """Steps from one update of the averages to the next."""

    @property
    def names(self) -> list[str]:
        """What the averages are called, in files and in the journal."""
        return [f"ema-{rate:g}" for rate in self.rates]

    def decays(self, step: int) -> list[float | None]:
        """The decay of each average in step number `step`, counted from 1; None: not updated."""
        if (step - 1) % self.update_every:
            return [None] * len(self.rates)
        return [self.warmup.decay(step, rate) if self.warmup else rate for rate in self.rates]


class PowerEma(Config):
    """Averages whose memory grows with training: beta(t) = (1 - 1/t)^(gamma + 1) (Karras et al. 2024, section 3.1).

    Two of them in checkpoints kept on the way (`checkpoint.keep_every`) give the average of any width afterwards:
    `python -m image_diffusion.ema`.
    """

    type: Literal["power"] = "power"
    """Power-function averages."""
    widths: tuple[Width, ...] = Field((0.05, 0.1), min_length=1)
    """One average for each relative width sigma_rel; the first is the one that is written as the weights."""

    @property
    def names(self) -> list[str]:
        """What the averages are called, in files and in the journal."""
        return [f"ema-{width:g}" for width in self.widths]

    def decays(self, step: int) -> list[float | None]:
        """The decay of each average in step number `step`, counted from 1; 0 copies."""
        return [(1.0 - 1.0 / step) ** (power_of_width(width) + 1.0) for width in self.widths]


Ema = Annotated[ExponentialEma | PowerEma, Field(discriminator="type")]


def width_of_power(gamma: float) -> float:
    """The relative width of an average with exponent gamma: its standard deviation over the time trained.

    sigma_rel = (gamma + 1)^(1/2) (gamma + 2)^-1 (gamma + 3)^-(1/2), Karras et al. 2024, section 3.1.
    """
    return math.sqrt((gamma + 1.0) / (gamma + 3.0)) / (gamma + 2.0)


def power_of_width(width: float) -> float:
    """The exponent gamma >= 0 of an average of a relative width in (0, 1 / sqrt(12)), by bisection: width falls."""
    low, high = 0.0, 1.0
    while width_of_power(high) > width:
        high *= 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if width_of_power(middle) > width else (low, middle)
    return 0.5 * (low + high)


class Averages:
    """The averages of one vector of weights. vectors: one of the same layout for each, by name."""

    def __init__(self, config: ExponentialEma | PowerEma, values: Tensor) -> None:
        self._config, self._values = config, values
        self.vectors = {name: values.clone() for name in config.names}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update number `step`, counted from 1."""
        for vector, decay in zip(self.vectors.values(), self._config.decays(step), strict=True):
            if decay == 0.0:
                vector.copy_(self._values)
            elif decay is not None:
                vector.lerp_(self._values, 1.0 - decay)
