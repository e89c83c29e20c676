"""The continuous process: alpha = scale sqrt(gamma(t)), sigma = sqrt(1 - gamma(t)), t in [0, 1], 1 the most noise.

Schedules: Chen 2023, "On the importance of noise scheduling for diffusion models", algorithm 1; scale below 1 shrinks
the image, section 2.2. Differences from the paper: all conversions account for alpha^2 + sigma^2 not being 1 with scale
below 1, and a grid ends at alpha = 1, so that a sampler returns the image at its original scale.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Grid, NoiseProcess, Respacing, count_steps, evenly


class _Gamma(Config):
    minimum: float = Field(1e-9, gt=0, lt=1)
    """Lower bound of gamma."""


class LinearGamma(_Gamma):
    """gamma = 1 - t."""

    type: Literal["linear"] = "linear"

    def gamma(self, t: Tensor) -> Tensor:
        """gamma at times t, any shape."""
        return (1 - t).clamp(min=self.minimum)


class _Between(_Gamma):
    start: float
    end: float
    if TYPE_CHECKING:  # a field of each class, after those two
        tau: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"start must be below end; got start {self.start} and end {self.end}.")
        try:
            first, last = self.gamma(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
        except OverflowError:
            first = last = math.nan
        if not first > last:  # NaN, too
            raise ValueError(
                f"gamma has no numbers with start {self.start:g}, end {self.end:g} and tau {self.tau:g}. Use a tau "
                f"nearer to 1."
            )
        return self

    @abstractmethod
    def gamma(self, t: Tensor) -> Tensor:
        """gamma at times t, any shape."""


class CosineGamma(_Between):
    """gamma follows cos(u pi / 2)^(2 tau) for u from start to end."""

    type: Literal["cosine"] = "cosine"
    start: float = Field(0.0, ge=0, le=1)
    """u at t = 0."""
    end: float = Field(1.0, ge=0, le=1)
    """u at t = 1."""
    tau: float = Field(1.0, gt=0)
    """A larger tau gives high noise more of the time."""

    def gamma(self, t: Tensor) -> Tensor:
        u = t * (self.end - self.start) + self.start
        first, last = (math.pow(math.cos(end * math.pi / 2), 2 * self.tau) for end in (self.start, self.end))
        value = torch.cos(u * math.pi / 2).pow(2 * self.tau)
        return ((last - value) / (last - first)).clamp(self.minimum, 1)


class SigmoidGamma(_Between):
    """gamma follows the logistic function of u / tau for u from start to end."""

    type: Literal["sigmoid"] = "sigmoid"
    start: float = -3.0
    """u at t = 0."""
    end: float = 3.0
    """u at t = 1."""
    tau: float = Field(1.0, gt=0)
    """A larger tau is closer to linear."""

    def gamma(self, t: Tensor) -> Tensor:
        u = t * (self.end - self.start) + self.start
        first, last = (1 / (1 + math.exp(-end / self.tau)) for end in (self.start, self.end))
        value = torch.sigmoid(u / self.tau)
        return ((last - value) / (last - first)).clamp(self.minimum, 1)


GammaSchedule = Annotated[LinearGamma | CosineGamma | SigmoidGamma, Field(discriminator="type")]


class Continuous(Config):
    """A process in continuous time."""

    type: Literal["continuous"] = "continuous"
    schedule: GammaSchedule = SigmoidGamma()
    """gamma, the share of the signal's variance."""
    scale: float = Field(1.0, gt=0, le=1)
    """Factor by which images are multiplied before noise is added; below 1, the network's input is normalised to unit
    variance."""
    min_time: float = Field(1e-4, gt=0, lt=1)
    """Training draws times from this to 1: at exactly 0 there is no noise left to predict."""

    def build(self) -> ContinuousProcess:
        """Build the process."""
        return ContinuousProcess(self)


class ContinuousProcess(NoiseProcess):
    """A process in continuous time; t is float64 [B] in [0, 1]."""

    def __init__(self, config: Continuous) -> None:
        self._config, self._schedule = config, config.schedule

    def draw(self, streams: Streams) -> Tensor:
        """Draw a time for each sample, uniform in [min_time, 1). Float64 [B]."""
        first = self._config.min_time
        return first + (1 - first) * streams.uniform("timestep").double()

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        gamma = self._schedule.gamma(t.double())
        return self._config.scale * gamma.sqrt(), (1 - gamma).sqrt()

    def network_time(self, t: Tensor) -> Tensor:
        return t.float()

    def network_input(self, x_t: Tensor) -> Tensor:
        """Return x_t [B, …], with scale below 1 each sample divided by its standard deviation."""
        if self._config.scale == 1:
            return x_t
        std = x_t.flatten(1).std(1, correction=0).clamp(min=1e-5)
        return x_t / std.view(-1, *[1] * (x_t.ndim - 1))

    def time_at(self, noise: float) -> float:
        """Return the time at which sigma / (alpha + sigma) is `noise`, in (0, 1]; 1 if all times have less noise."""

        def noise_at(index: int) -> float:
            alpha, sigma = self.levels(torch.tensor(index / 2**30, dtype=torch.float64))
            return (sigma / (alpha + sigma)).item()

        return bisect_left(range(2**30), noise, key=noise_at) / 2**30

    def grid(self, num_steps: Respacing, time_difference: float = 0.0, last_step: float | None = None) -> Grid:
        """Return times evenly spaced from 1 to 0. Raises ValueError for anything but a number of steps.

        time_difference: additional length of each step beyond the next time (Chen et al. 2023, "Analog bits", section
        3.3). last_step: size of the last step; None: as the others.
        """
        times = evenly(count_steps(num_steps, "continuous"), last_step)
        alpha, sigma = self._to_clean(times)
        later = (times[1:] - time_difference).clamp(min=0)
        target = self._to_clean(later) if time_difference else None
        return Grid(time=times[:-1], alpha=alpha, sigma=sigma, target=target)

    def _to_clean(self, times: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.levels(times)
        # Not `scale`: the sampler divides its result by the last alpha.
        alpha[-1], sigma[-1] = 1, 0
        return alpha, sigma
