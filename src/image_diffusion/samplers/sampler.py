"""What every sampler shares: its section of the configuration, and how it is called."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.process.grid import Denoised, Denoiser, Grid

NumSteps = Annotated[
    Annotated[int, Field(gt=0)] | str | list[int],
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

    num_steps: NumSteps = 50
    clip_denoised: bool = False
    """Clamp each predicted x0 to [-1, 1], and derive eps from it again: for pixels, not for latents."""

    @property
    def draws_noise(self) -> bool:
        """Whether the steps add noise of their own; if not, the first noise decides the sample."""
        return False

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
        x0 = denoised.x0.clamp(-1, 1)
        return replace(denoised, x0=x0, eps=(x - alphas[i] * x0) / sigmas[i])

    return clipped_denoiser
