"""The discrete process: timesteps 0 (least noise) … T - 1, alpha_bar_t the product of 1 - beta (Ho et al. 2020)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import NoiseProcess, Respacing, count_steps, karras_sigmas
from image_diffusion.process.grid import Grid, Steps
from image_diffusion.process.schedules import BetaSchedule, Linear, checked_betas


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
