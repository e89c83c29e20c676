"""Base of every sampler: its section of the configuration, and how it is called."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.denoiser import Variance, clamp
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow


def _checked_num_steps(value: object) -> object:
    counts = value if isinstance(value, list) else [value]
    if isinstance(value, str) or (all(type(count) is int and count >= 0 for count in counts) and any(counts)):
        return value
    raise ValueError(
        f"got {value!r}; expected a number of steps, at least 1, or which timesteps to keep. "
        'Use 50, "ddim50" or "10,15,20".'
    )


NumSteps = Annotated[
    int | str | list[int],
    BeforeValidator(_checked_num_steps),
    Field(
        description="Number of steps, evenly spaced in time. For a discrete process also which timesteps to keep, as "
        'IDDPM writes it: "ddim50", "10,15,20" or [10, 15, 20] (so many from each third), "" for every one.'
    ),
]


@dataclass(frozen=True)
class Step:
    """State of a sampler after each step. x: [B, ...] at the next noise level. x0: [B, ...], the prediction used."""

    x: Tensor
    x0: Tensor


class SamplerConfig(Config):
    """Base of samplers, from noise to samples. A derived class only defines its steps. Called as sampler(denoiser,
    grid, noise, streams)."""

    needs_average_velocity: ClassVar[bool] = False
    """True if the sampler requires a network of average velocities (`Grid.interval`)."""

    type: str
    """Name of the sampler."""
    num_steps: NumSteps = 50
    clip_denoised: bool | None = None
    """Clamp each predicted x0 to [-1, 1] and recompute eps from it; unset: true for pixels, false for latents."""
    shift: float | None = Field(None, ge=1e-6, le=1e3)
    """Time shift of the flow process for sampling only, in place of `process.shift`."""

    @property
    def draws_noise(self) -> bool:
        """True if the steps add noise; otherwise the initial noise determines the sample."""
        return False

    @property
    def can_start_anywhere(self) -> bool:
        """True if sampling may start at any point of the grid, from x_t at its noise level."""
        return True

    def calls(self, grid: Grid) -> int:
        """Return the number of calls of the network for one image, without guidance."""
        return grid.num_steps

    def grid(self, process: Process) -> Grid:
        """Return the points of a process to sample at. Raises ValueError if this sampler or its steps do not fit it."""
        return self.shifted(process).build().grid(self.num_steps)

    def shifted(self, process: Process) -> Process:
        """Return the process with the sampler's time shift. Raises ValueError if the process has no time shift."""
        if self.shift is None:
            return process
        if not isinstance(process, Flow):
            raise ValueError(
                f"shift is {self.shift:g}, but the process is {process.type}: only flow's times shift. Leave it out."
            )
        return process.model_copy(update={"shift": self.shift})

    def fitted(self, variance: Variance, bounded: bool) -> Self:
        """Return the sampler with unset values taken from the model: the variance of its training, and whether x lies
        in [-1, 1]."""
        # Latents are unbounded: clamping them would change every image.
        clip = bounded if self.clip_denoised is None else self.clip_denoised
        return self.model_copy(update={"clip_denoised": clip})

    def __call__(self, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams) -> Tensor:
        """Sample x0 [B, ...] from standard normal noise [B, ...].

        denoiser: the prediction at point i of the grid. streams: of these images; they determine all further noise. The
        result is divided by the last alpha, so that a process that ends at x = alpha x0 gives x0 as well.
        """
        x = noise
        for step in self.trajectory(denoiser, grid, noise, streams):
            x = step.x
        return x / grid.alpha[-1].item()

    def trajectory(self, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams) -> Iterator[Step]:
        """Sample one step at a time, from most noise to least; x is that of the process, not divided by alpha."""
        denoiser = clipped(denoiser, grid) if self.clip_denoised else denoiser
        return self.steps(denoiser, grid, initial_scale(grid) * noise, streams)

    @abstractmethod
    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """Yield the sampler's steps, from x [B, ...] at the first noise level of the grid to the last."""


class TimeDifferenceSampler(SamplerConfig):
    """Sampler whose steps may end at another noise level than the grid's next point (`Grid.target`)."""

    time_difference: float = Field(0.0, ge=0, lt=1)
    """Additional length of each step beyond the next time, in continuous time (Chen et al. 2023, "Analog bits",
    3.3)."""

    def grid(self, process: Process) -> Grid:
        """Return the grid of points, as for every sampler. Raises ValueError for a time difference in discrete time,
        and for noise on the path of a flow."""
        if isinstance(process, Flow) and self.draws_noise:
            raise ValueError(
                f"The {self.type} sampler adds noise at every step, which the flow process of this model does not "
                "allow. Use sde, euler, heun, dpm_solver, unipc, or ddim with eta 0."
            )
        if not self.time_difference:
            return super().grid(process)
        if not isinstance(process, Continuous):
            raise ValueError(
                f"time_difference is {self.time_difference:g}, but in the process {process.type} time is not "
                f"continuous. Leave it out."
            )
        self.shifted(process)  # raises for a shift
        return process.build().grid(self.num_steps, self.time_difference)


class SpacedByNoise(SamplerConfig):
    """Sampler whose points may be spaced unevenly in time."""

    spacing: Literal["time", "karras"] = "time"
    """Spacing of the steps of a discrete process: evenly in time, or evenly in the seventh root of sigma / alpha
    (Karras et al. 2022), as with diffusers' use_karras_sigmas. The process edm always uses karras."""

    def shifted(self, process: Process) -> Process:
        """Return the process with the sampler's time shift, as for every sampler. Raises ValueError for Karras's
        spacing unless the process is discrete."""
        if self.spacing == "karras" and not isinstance(process, Discrete):
            raise ValueError(
                f"spacing is karras, but the process is {process.type}: only discrete takes it. edm has that spacing "
                f"already, and the others begin where no signal is left. Leave it out."
            )
        return super().shifted(process)

    def grid(self, process: Process) -> Grid:
        process = self.shifted(process)
        if self.spacing == "karras" and isinstance(process, Discrete):
            return process.build().karras_grid(self.num_steps)
        return super().grid(process)


def initial_scale(grid: Grid) -> float:
    """Return the standard deviation of x_t at the grid's first level, for x0 of unit variance."""
    return math.hypot(grid.alpha[0].item(), grid.sigma[0].item())


def clipped(denoiser: Denoiser, grid: Grid) -> Denoiser:
    """Return the denoiser with x0 clamped to [-1, 1] and eps = (x_t - alpha x0) / sigma derived from it again."""
    alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()

    def clipped_denoiser(x: Tensor, i: int) -> Denoised:
        denoised = denoiser(x, i)
        x0 = clamp(denoised.x0)
        return replace(denoised, x0=x0, eps=(x - alphas[i] * x0) / sigmas[i])

    return clipped_denoiser
