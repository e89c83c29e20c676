"""DDIM as in DALLE2-pytorch, to reproduce the samples of its published priors: other timesteps, and the alpha_bar of
the timestep before. It uses int(linspace(-1, T, N + 1)) without the last value, where -1 stands for x0; so it starts
near T - (T + 1) / N instead of T - 1 and makes N - 1 calls. The network receives the true timestep, and its output is
interpreted at it, but the step is taken as if x_t had the noise of the timestep before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.discrete import DiscreteProcess
from image_diffusion.samplers.base import Step
from image_diffusion.samplers.ddim import Ddim

_LEAST = 1e-20  # replaces the zero variance of a level that a step starts from


@dataclass(frozen=True)
class LegacyGrid(Grid):
    """The timesteps of the original. stepping: the same points, with the noise levels that the original's steps use."""

    stepping: Grid | None = None


class LegacyDdim(Ddim):
    """DDIM with the grid and the noise levels of DALLE2-pytorch. Use it for weights of that project only."""

    type: Literal["legacy_ddim"] = "legacy_ddim"  # type: ignore[assignment]
    eta: float = Field(1.0, ge=0, le=1)
    """Standard deviation of each step's noise, as a share of the posterior's. The original's default is 1."""

    def grid(self, process: Process) -> LegacyGrid:
        """Return the grid. Raises ValueError for another process than discrete, and for fewer than 2 or too many
        steps."""
        built = process.build()
        if not isinstance(built, DiscreteProcess):
            raise ValueError(f"The legacy_ddim sampler needs a discrete process, not {process.type}. Use ddim.")
        T, text = built.num_timesteps, str(self.num_steps)
        count = int(text) if text.isdecimal() else 0
        if not 2 <= count < T:
            raise ValueError(
                f"The legacy_ddim sampler takes from 2 to {T - 1} steps of {T} timesteps; got {self.num_steps!r}. "
                f"Use ddpm for all of them."
            )
        timesteps = torch.linspace(-1, T, count + 1)[:-1].int().flip(0)[:-1].long()
        clean = built.alpha_bar.new_ones(1)
        before = torch.cat([clean, built.alpha_bar[:-1]])

        def levels(alpha_bar: Tensor) -> tuple[Tensor, Tensor]:
            variance = torch.cat([(1 - alpha_bar[timesteps]).clamp(min=_LEAST), torch.zeros_like(clean)])
            return torch.cat([alpha_bar[timesteps], clean]).sqrt(), variance.sqrt()

        time = built.network_time(timesteps).double()
        return LegacyGrid(time, *levels(built.alpha_bar), stepping=Grid(time, *levels(before)))

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """Yield the steps of DDIM at the noise levels of the original."""
        assert isinstance(grid, LegacyGrid) and grid.stepping is not None
        yield from super().steps(denoiser, grid.stepping, x, streams)
