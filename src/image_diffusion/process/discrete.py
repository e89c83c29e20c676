"""The discrete process: timesteps 0 (least noise) … T - 1, alpha_bar_t the product of 1 - beta (Ho et al. 2020). Its
schedules of beta_t, the variance of the noise added at timestep t."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Grid, NoiseProcess, Respacing, Steps, count_steps, karras_sigmas


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


@cache  # an experiment is validated with its process two dozen times
def checked_betas(schedule: BetaSchedule, num_timesteps: int) -> Tensor:
    """Return the betas of a schedule, float64 [num_timesteps], as one tensor for all callers, which must not change it.
    Raises ValueError where one is not in (0, 1]."""
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


class Discrete(Config):
    """A discrete process."""

    type: Literal["discrete"] = "discrete"
    schedule: BetaSchedule = Linear()
    """The betas."""
    num_timesteps: int = Field(1000, gt=0)
    """T, the number of timesteps of the schedule."""
    respacing: str | int | list[int] = ""
    """Timesteps to train on: "" for all; 250, [10, 15, 20] in equal sections, or "ddim50" with an integer stride. A
    sampler with the same num_steps uses only these timesteps; other samplers also use others of the schedule."""
    rescale_timesteps: bool = False
    """Pass t * 1000 / num_timesteps to the network in place of t."""

    @model_validator(mode="after")
    def _buildable(self) -> Discrete:
        self._betas_and_timesteps()
        return self

    def build(self) -> DiscreteProcess:
        """Build the process. Raises ValueError where a beta is not in (0, 1] or the respacing is impossible."""
        betas, timesteps = self._betas_and_timesteps()
        return DiscreteProcess(torch.cumprod(1 - betas, 0), timesteps, self.rescale_timesteps)

    def _betas_and_timesteps(self) -> tuple[Tensor, list[int]]:
        betas = checked_betas(self.schedule, self.num_timesteps)
        return betas, space_timesteps(self.num_timesteps, self.respacing)


class DiscreteProcess(NoiseProcess):
    """A discrete process restricted to some timesteps of its schedule; t counts the timesteps kept.

    num_timesteps: number of timesteps kept. timestep_map: int64 [num_timesteps], their timesteps of the schedule.
    alpha_bar, betas: float64 [num_timesteps]. steps: t -> t - 1 for every t; the step of t = 0 ends at x0. All are on
    the CPU; see `steps_on`.
    """

    def __init__(self, schedule_alpha_bar: Tensor, timesteps: list[int], rescale_timesteps: bool = False) -> None:
        self._schedule_alpha_bar, self._rescale_timesteps = schedule_alpha_bar, rescale_timesteps
        self.num_timesteps = len(timesteps)
        self.timestep_map = torch.tensor(timesteps)
        self.alpha_bar = schedule_alpha_bar[self.timestep_map]
        self.betas = 1 - self.alpha_bar / torch.cat([self.alpha_bar.new_ones(1), self.alpha_bar[:-1]])
        self._time_scale = 1000.0 / len(schedule_alpha_bar) if rescale_timesteps else 1.0
        self._network_time = self.timestep_map.double() * self._time_scale
        self.steps = self.grid().steps.flip()
        self._steps_on: dict[torch.device, tuple[Steps, Tensor]] = {}

    def draw(self, streams: Streams) -> Tensor:
        """Draw a timestep for each sample, uniform. Int64 [B]."""
        return streams.integers("timestep", self.num_timesteps)

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        steps = self.steps_on(t.device)
        return steps.alpha[t], steps.sigma[t]

    def network_time(self, t: Tensor) -> Tensor:
        return self._on(t.device)[1][t].float()

    def fraction(self, t: Tensor) -> Tensor:
        return t.double() / self.num_timesteps

    def steps_on(self, device: torch.device) -> Steps:
        """Return the steps on a device; only the first call copies them."""
        return self._on(device)[0]

    def respaced(self, respacing: Respacing) -> DiscreteProcess:
        """Return the process at other timesteps of the whole schedule. Raises ValueError (`space_timesteps`)."""
        timesteps = space_timesteps(len(self._schedule_alpha_bar), respacing)
        return DiscreteProcess(self._schedule_alpha_bar, timesteps, self._rescale_timesteps)

    def grid(self, num_steps: Respacing | None = None) -> Grid:
        """Return the points to sample at: this process's own timesteps, or others of the whole schedule (`respaced`). A
        single point is the last timestep: the first one would treat the initial noise as an image."""
        if num_steps is not None:
            process = self.respaced(num_steps)
            if process.num_timesteps == 1:
                last = len(self._schedule_alpha_bar) - 1
                process = DiscreteProcess(self._schedule_alpha_bar, [last], self._rescale_timesteps)
            return process.grid()
        clean = self.alpha_bar.new_ones(1)
        alpha_bar = torch.cat([self.alpha_bar.flip(0), clean])
        return Grid(time=self._network_time.flip(0), alpha=alpha_bar.sqrt(), sigma=(1 - alpha_bar).sqrt())

    def solver_grid(self, num_steps: int) -> Grid:
        """Return the points of diffusers' multistep solvers: one timestep more than the steps, evenly spaced, without
        timestep 0. If num_steps is all timesteps of this process or of the schedule, none is left out. Raises
        ValueError for more."""
        num_timesteps = len(self._schedule_alpha_bar)
        if num_steps == self.num_timesteps or num_steps >= num_timesteps:
            return self.grid(num_steps)
        timesteps = np.linspace(0, num_timesteps - 1, num_steps + 1).round().astype(int)[1:].tolist()
        return DiscreteProcess(self._schedule_alpha_bar, timesteps, self._rescale_timesteps).grid()

    def karras_grid(self, num_steps: Respacing) -> Grid:
        """Return num_steps points in Karras's spacing of sigma / alpha, from the schedule's last timestep to its first,
        and the clean end; the network receives the timestep nearest in log(sigma / alpha). The points equal those of
        diffusers' `use_karras_sigmas`. Raises ValueError for anything but a number, and if no signal is left at the
        last timestep."""
        sigmas = (1 / self._schedule_alpha_bar - 1).sqrt()
        if not sigmas[-1].isfinite():
            raise ValueError("The schedule ends without any signal, so that Karras's spacing cannot begin. Use time.")
        chosen = karras_sigmas(sigmas[-1].item(), sigmas[0].item(), count_steps(num_steps, "karras-spaced discrete"))
        timesteps = np.interp(chosen.log().numpy(), sigmas.log().numpy(), np.arange(len(sigmas))).round()
        alpha = torch.cat([chosen, chosen.new_zeros(1)]).square().add(1).rsqrt()
        return Grid(time=torch.from_numpy(timesteps) * self._time_scale, alpha=alpha, sigma=(1 - alpha**2).sqrt())

    def _on(self, device: torch.device) -> tuple[Steps, Tensor]:
        if device not in self._steps_on:
            self._steps_on[device] = (self.steps.to(device), self._network_time.to(device))
        return self._steps_on[device]


def space_timesteps(num_timesteps: int, respacing: Respacing) -> list[int]:
    """Return the timesteps kept of 0 … num_timesteps - 1, ascending (Nichol & Dhariwal 2021, section 4).

    Sections are as equal as they can be, the first ones longer; each keeps its first and last timestep and spreads the
    others evenly. "ddimN" keeps every s-th timestep for the smallest s that leaves N. Raises ValueError when a section
    has fewer timesteps than requested, when no stride leaves N, or when the text is not a list of counts.
    """
    if respacing == "":
        return list(range(num_timesteps))
    if isinstance(respacing, str) and respacing.startswith("ddim"):
        return _strided(num_timesteps, respacing)
    counts = _counts(respacing)
    if sum(counts) == 0:
        raise ValueError(f"Respacing {respacing!r} keeps no timestep. Keep at least 1.")

    timesteps: list[int] = []
    size, longer = divmod(num_timesteps, len(counts))
    start = 0
    for section, count in enumerate(counts):
        section_size = size + (section < longer)
        timesteps += [start + offset for offset in _spread(section_size, count, respacing)]
        start += section_size
    return timesteps


def _spread(size: int, count: int, respacing: Respacing) -> list[int]:
    """Return `count` of 0 … size - 1, including both ends. The stride is summed in floating point, and halves round to
    even: published samples depend on this, and i * stride keeps other timesteps for 300 in sections of 10, 15, 20."""
    if count > size:
        raise ValueError(
            f"Respacing {respacing!r} asks for {count} timesteps of a section that has {size}. Use at most {size}."
        )
    stride = 1.0 if count <= 1 else (size - 1) / (count - 1)
    offsets, position = [], 0.0
    for _ in range(count):
        offsets.append(round(position))
        position += stride
    return offsets


def _strided(num_timesteps: int, respacing: str) -> list[int]:
    count = _integer(respacing.removeprefix("ddim"), respacing)
    for stride in range(1, num_timesteps):
        timesteps = list(range(0, num_timesteps, stride))
        if len(timesteps) == count:
            return timesteps
    advice = f'Use "{count}" for uneven strides.' if 0 < count <= num_timesteps else f"Use at most {num_timesteps}."
    raise ValueError(f"Respacing {respacing!r}: no integer stride keeps {count} of {num_timesteps} timesteps. {advice}")


def _counts(respacing: Respacing) -> list[int]:
    if isinstance(respacing, int):
        counts = [respacing]
    elif isinstance(respacing, str):
        counts = [_integer(part, respacing) for part in respacing.split(",")]
    else:
        counts = list(respacing)
    if not counts or min(counts) < 0:
        raise ValueError(f'Respacing {respacing!r} is not a list of counts. Use 250, [10, 15, 20] or "ddim50".')
    return counts


def _integer(text: str, respacing: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"Respacing {respacing!r} is not a list of counts: {text!r} is not an integer. "
            'Use "250", "10,15,20" or "ddim50".'
        ) from None
