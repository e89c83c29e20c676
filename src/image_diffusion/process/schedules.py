"""Schedules of the discrete process: beta_t, the variance of the noise added at timestep t."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config


class _Ranged(Config):
    """Base of schedules between two betas."""

    beta_start: float = Field(1e-4, gt=0, le=1)
    """Smaller beta, of the least noisy timestep."""
    beta_end: float = Field(0.02, gt=0, le=1)
    """Larger beta, of the noisiest timestep."""
    scaled: bool = False
    """Multiply both by 1000 / num_timesteps, so that the last timestep is as noisy at any number of timesteps."""

    def ends(self, num_timesteps: int) -> tuple[float, float]:
        """Return the two betas for a number of timesteps."""
        scale = 1000.0 / num_timesteps if self.scaled else 1.0
        return scale * self.beta_start, scale * self.beta_end


class Linear(_Ranged):
    """Evenly spaced betas (Ho et al. 2020, section 4)."""

    type: Literal["linear"] = "linear"
    scaled: bool = True

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        return torch.linspace(*self.ends(num_timesteps), num_timesteps, dtype=torch.float64)


class Cosine(Config):
    """alpha_bar falls as a squared cosine (Nichol & Dhariwal 2021, equation 17)."""

    type: Literal["cosine"] = "cosine"

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        s, T = 0.008, num_timesteps
        f = [math.cos((i / T + s) / (1 + s) * math.pi / 2) ** 2 for i in range(T + 1)]
        return torch.tensor([min(1 - f[i + 1] / f[i], 0.999) for i in range(T)], dtype=torch.float64)


class Quad(_Ranged):
    """Squares of evenly spaced numbers."""

    type: Literal["quad"] = "quad"

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        start, end = self.ends(num_timesteps)
        return torch.linspace(start**0.5, end**0.5, num_timesteps, dtype=torch.float64) ** 2


class _Warmup(_Ranged):
    rising: ClassVar[float]
    """Share of the timesteps over which beta rises."""

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        start, end = self.ends(num_timesteps)
        betas = torch.full((num_timesteps,), end, dtype=torch.float64)
        rise = int(num_timesteps * self.rising)
        betas[:rise] = torch.linspace(start, end, rise, dtype=torch.float64)
        return betas


class Warmup10(_Warmup):
    """A linear rise to beta_end over the first tenth, then beta_end."""

    rising: ClassVar[float] = 0.1

    type: Literal["warmup10"] = "warmup10"


class Warmup50(_Warmup):
    """A linear rise to beta_end over the first half, then beta_end."""

    rising: ClassVar[float] = 0.5

    type: Literal["warmup50"] = "warmup50"


class Const(Config):
    """A constant beta."""

    type: Literal["const"] = "const"
    beta: float = Field(0.02, gt=0, le=1)
    """The beta of every timestep."""

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        return torch.full((num_timesteps,), self.beta, dtype=torch.float64)


class Jsd(Config):
    """1/T, 1/(T - 1), …, 1: alpha_bar falls linearly to exactly zero (Sohl-Dickstein et al. 2015, section 2.4.1)."""

    type: Literal["jsd"] = "jsd"

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        return 1.0 / torch.arange(num_timesteps, 0, -1, dtype=torch.float64)


class Sigmoid(_Ranged):
    """Betas rise as a logistic function of -6 … 6."""

    type: Literal["sigmoid"] = "sigmoid"

    def betas(self, num_timesteps: int) -> Tensor:
        """Float64 [num_timesteps]."""
        start, end = self.ends(num_timesteps)
        return torch.linspace(-6, 6, num_timesteps, dtype=torch.float64).sigmoid() * (end - start) + start


BetaSchedule = Annotated[
    Linear | Cosine | Quad | Warmup10 | Warmup50 | Const | Jsd | Sigmoid, Field(discriminator="type")
]


def checked_betas(schedule: BetaSchedule, num_timesteps: int) -> Tensor:
    """Return the betas of a schedule, float64 [num_timesteps]. Raises ValueError where one is not in (0, 1]."""
    betas = schedule.betas(num_timesteps)
    low, high = betas.min().item(), betas.max().item()
    if low > 0 and high <= 1:
        return betas
    shown = f"a maximum of {high:.6}" if high > 1 else f"a minimum of {low:.6}"
    advice = "Choose another schedule or another num_steps."
    if isinstance(schedule, _Ranged) and schedule.scaled:
        largest = max(schedule.beta_start, schedule.beta_end)
        advice = f"Use num_steps >= {math.ceil(1000 * largest)}."
    raise ValueError(
        f"Every beta must lie in (0, 1]; got {shown} from {schedule.type}(num_steps={num_timesteps}). {advice}"
    )
