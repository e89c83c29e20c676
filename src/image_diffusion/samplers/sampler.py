"""What every sampler shares: its section of the configuration, and how it is called."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.flow import Flow
from image_diffusion.process.grid import Denoised, Denoiser, Grid
from image_diffusion.process.parameterization import clamp


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
    """What a sampler shows after each step. x: [B, ...] at the next noise level. x0: [B, ...], the prediction used."""

    x: Tensor
    x0: Tensor


class SamplerConfig(Config):
    """Noise -> samples. Called as sampler(denoiser, grid, noise, streams); a sampler only says how its steps go."""

    takes_time_difference: ClassVar[bool] = False
    """Whether its steps can end elsewhere than at the grid's next point (`Grid.target`)."""

    type: str
    """Which sampler."""
    num_steps: NumSteps = 50
    clip_denoised: bool = False
    """Clamp each predicted x0 to [-1, 1], and derive eps from it again: for pixels, not for latents."""

    @property
    def draws_noise(self) -> bool:
        """Whether the steps add noise of their own; if not, the first noise decides the sample."""
        return False

    def calls(self, grid: Grid) -> int:
        """How often the network is asked for one image, without guidance."""
        return grid.num_steps

    def grid(self, process: Process) -> Grid:
        """The points of a process to sample at. Raises ValueError where this sampler or its steps do not fit it."""
        if isinstance(process, Flow) and self.draws_noise:
            raise ValueError(
                f"The {self.type} sampler adds noise at every step, which the flow process of this model does not "
                "provide for. Use euler, heun, dpm_solver, unipc, or ddim with eta 0."
            )
        if isinstance(process, Continuous) and process.time_difference > 0 and not self.takes_time_difference:
            raise ValueError(
                f"The {self.type} sampler follows an ODE from point to point, but the process has time_difference "
                f"{process.time_difference}. Use time_difference 0, or the ddpm or the ddim sampler."
            )
        return process.build().grid(self.num_steps)

    def __call__(self, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams) -> Tensor:
        """Samples of x0 [B, ...] from standard normal noise [B, ...].

        denoiser: the prediction at point i of the grid. streams: of these images; their seeds decide all further noise.
        The result is divided by the last alpha, so that a process that ends at x = alpha x0 gives x0 as well.
        """
        x = noise
        for step in self.trajectory(denoiser, grid, noise, streams):
            x = step.x
        return x / grid.alpha[-1].item()

    def trajectory(self, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams) -> Iterator[Step]:
        """The same one step at a time, from most noise to least; x as the process has it, not divided by alpha."""
        denoiser = clipped(denoiser, grid) if self.clip_denoised else denoiser
        return self.steps(denoiser, grid, initial_scale(grid) * noise, streams)

    @abstractmethod
    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """This sampler's rule, from x [B, ...] at the first noise level of the grid to the last."""


def initial_scale(grid: Grid) -> float:
    """The standard deviation of x_t at the grid's first level, for x0 of unit variance."""
    return math.hypot(grid.alpha[0].item(), grid.sigma[0].item())


def clipped(denoiser: Denoiser, grid: Grid) -> Denoiser:
    """The denoiser with x0 clamped to [-1, 1] and eps = (x_t - alpha x0) / sigma derived from it again."""
    alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()

    def clipped_denoiser(x: Tensor, i: int) -> Denoised:
        denoised = denoiser(x, i)
        x0 = clamp(denoised.x0)
        return replace(denoised, x0=x0, eps=(x - alphas[i] * x0) / sigmas[i])

    return clipped_denoiser
