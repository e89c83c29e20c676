"""Running averages of the weights, each updated by one operation on one vector; and the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.training.checkpoint.checkpoint import StateDict
from image_diffusion.training.parallel.flat_parameters import Flat, Vector

Rate = Annotated[float, Field(ge=0, lt=1)]
Width = Annotated[float, Field(gt=0, lt=0.28)]

LARGEST_INITIAL_SHARE = 0.05
"""Largest share that the initial weights may have in an average at the end of a training without a warning."""


class Warmup(Config):
    """Warmup of an average by a decay that rises: decay(e) = 1 - (1 + e / inv_gamma)^-power (ema_pytorch 0.8)."""

    type: Literal["inverse_power"] = "inverse_power"
    """The decay rises as 1 - (1 + steps / inv_gamma)^-power, as in ema_pytorch."""
    update_after_step: int = Field(100, ge=0)
    """Number of steps for which the average is a copy of the weights."""
    inv_gamma: float = Field(1.0, gt=0)
    """Steps in which the decay rises to 1 - 2^-power."""
    power: float = Field(2 / 3, gt=0, le=1)
    """Exponent of the rise of the decay towards its rate."""
    min_decay: float = Field(0.0, ge=0, lt=1)
    """The smallest decay."""

    def decay(self, step: int, rate: float, every: int = 1) -> float:
        """Return the decay of the update in step number `step`, counted from 1, regardless of the interval between
        updates; 0 copies."""
        since = step - self.update_after_step - 1
        if since <= 0:
            return 0.0
        return min(max(1.0 - float((1.0 + since / self.inv_gamma) ** -self.power), self.min_decay), rate)


class RampUp(Config):
    """Warmup of an average by a half-life of at most `ratio` times the steps done (EDM, Karras et al. 2022:
    `ema_rampup_ratio` of its training, 0.05). So the average is useful after any number of steps, and contains nothing
    of the initial weights.
    """

    type: Literal["ramp_up"] = "ramp_up"
    """The half-life is at most a share of the steps done, as in EDM."""
    ratio: float = Field(0.05, gt=0, le=1)
    """Largest half-life as a share of the steps done."""

    def decay(self, step: int, rate: float, every: int = 1) -> float:
        """Return the decay of the update in step number `step`, counted from 1, with one update in `every` steps."""
        return min(math.pow(0.5, every / (self.ratio * step)), rate)


class _Ema(Config):
    numbers: ClassVar[str]
    """Key of the numbers of the averages."""

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        if len(set(self.names)) < len(self.names):
            rates = list(getattr(self, self.numbers))
            raise ValueError(f"{rates} name an average twice: {', '.join(self.names)}. Give each once.")
        return self

    @property
    def names(self) -> list[str]:
        """Names of the averages, in files and in the journal."""
        return [average_name(number) for number in getattr(self, self.numbers)]


class ExponentialEma(_Ema):
    """ema <- rate ema + (1 - rate) weights."""

    numbers: ClassVar[str] = "rates"

    type: Literal["exponential"] = "exponential"
    """Exponential averages."""
    rates: tuple[Rate, ...] = (0.9999,)
    """Rates of the averages. The first average is written as the weights, unless `train.weights` names another. Empty:
    no average."""
    warmup: Annotated[Warmup | RampUp, Field(discriminator="type")] | None = None
    """Warmup of the averages; unset: the full rate from the first step."""
    update_every: int = Field(1, gt=0)
    """Number of steps between updates of the averages."""

    def decays(self, step: int) -> list[float | None]:
        """Return the decay of each average in step number `step`, counted from 1; None: not updated."""
        if (step - 1) % self.update_every:
            return [None] * len(self.rates)
        every = self.update_every
        return [self.warmup.decay(step, rate, every) if self.warmup else rate for rate in self.rates]

    def advice(self, name: str, steps: int) -> list[str]:
        """Return a sentence if much of the initial weights is left in an average after a number of steps."""
        share = self.initial_share(name, steps)
        if share <= LARGEST_INITIAL_SHARE:
            return []
        fitting = self.fitting_rate(steps, LARGEST_INITIAL_SHARE)
        rates = f"train.ema.rates: [{fitting:g}] or less, or " if fitting > 0 else ""
        return [
            f"After {steps:,} steps {share:.0%} of the initial weights are still in the average {name}. "
            f"Take {rates}train.ema.warmup: {{type: ramp_up}}."
        ]

    def initial_share(self, name: str, steps: int) -> float:
        """Return the share of the initial weights in an average after a number of steps."""
        if self.warmup is not None:  # its first update is almost a copy
            return 0.0
        return math.pow(self.rates[self.names.index(name)], -(-steps // self.update_every))

    def fitting_rate(self, steps: int, share: float) -> float:
        """Return the largest rate, to one digit of 1 - rate, whose average contains at most a share of the initial
        weights after `steps`."""
        left = 1.0 - math.pow(share, 1.0 / -(-steps // self.update_every))
        digit = 10.0 ** math.floor(math.log10(left))
        return round(1.0 - math.ceil(left / digit - 1e-9) * digit, 15)


class PowerEma(_Ema):
    """Averages whose length grows with training: beta(t) = (1 - 1/t)^(gamma + 1) (Karras et al. 2024, section 3.1).

    From two of them in permanent checkpoints (`checkpoint.keep_every`), `python -m image_diffusion ema` reconstructs
    the average of any width after training.
    """

    numbers: ClassVar[str] = "widths"

    type: Literal["power"] = "power"
    """Power-function averages."""
    widths: tuple[Width, ...] = Field((0.05, 0.1), min_length=1)
    """Relative widths sigma_rel of the averages. The first average is written as the weights, unless `train.weights`
    names another."""

    def decays(self, step: int) -> list[float | None]:
        """Return the decay of each average in step number `step`, counted from 1; 0 copies."""
        return [(1.0 - 1.0 / step) ** (power_of_width(width) + 1.0) for width in self.widths]

    def advice(self, name: str, steps: int) -> list[str]:
        """Return no sentence: an average contains nothing of the initial weights, since its first update copies."""
        return []


def average_name(rate: float) -> str:
    """Return the name of the average of a rate or a width."""
    return f"ema-{rate:g}"


Ema = Annotated[ExponentialEma | PowerEma, Field(discriminator="type")]


def width_of_power(gamma: float) -> float:
    """Return the relative width of an average with exponent gamma: its standard deviation over the time trained.

    sigma_rel = (gamma + 1)^(1/2) (gamma + 2)^-1 (gamma + 3)^-(1/2), Karras et al. 2024, section 3.1.
    """
    return math.sqrt((gamma + 1.0) / (gamma + 3.0)) / (gamma + 2.0)


def power_of_width(width: float) -> float:
    """Return the exponent gamma >= 0 of an average of a relative width in (0, 1 / sqrt(12)), by bisection: width
    falls."""
    low, high = 0.0, 1.0
    while width_of_power(high) > width:
        high *= 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if width_of_power(middle) > width else (low, middle)
    return 0.5 * (low + high)


class Averages:
    """The averages of one vector of weights. vectors: the averages by name, in the layout of the weights."""

    def __init__(self, config: ExponentialEma | PowerEma, values: Tensor) -> None:
        self._config, self._values = config, values
        self.vectors = {name: values.clone() for name in config.names}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages with the weights after update number `step`, counted from 1."""
        for vector, decay in zip(self.vectors.values(), self._config.decays(step), strict=True):
            if decay == 0.0:
                vector.copy_(self._values)
            elif decay is not None:
                vector.lerp_(self._values, 1.0 - decay)


class BestWeights:
    """The average at the validation with the smallest loss so far, and the network's buffers at that step.

    step: step of that validation; 0 before the first. buffers: copies the buffers learned without gradients, by name.
    wanted: False if the best weights are not stored.
    """

    def __init__(self, flat: Flat, buffers: Callable[[], dict[str, Tensor]], wanted: bool) -> None:
        self._flat, self._copy_buffers, self.wanted = flat, buffers, wanted
        self.loss, self.step = math.inf, 0
        self.values, self.buffers = flat.values, dict[str, Tensor]()

    def offer(self, loss: float, step: int, values: Tensor) -> None:
        """Store the average of a validation, the same in every process, if its loss is the smallest so far."""
        if not self.step or loss < self.loss:
            self.loss, self.step, self.values, self.buffers = loss, step, values.clone(), self._copy_buffers()

    def tensors(self) -> StateDict:
        """Return the tensors to load a checkpoint into, after `load_state_dict`."""
        return {"": Vector(self._flat, self.values), **self.buffers}

    def state_dict(self) -> dict[str, Any]:
        """Return loss and step, empty before the first validation."""
        return {"loss": self.loss, "step": self.step} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set loss and step, and allocate the tensors of their weights."""
        self.offer(state["loss"], state["step"], self._flat.values)
