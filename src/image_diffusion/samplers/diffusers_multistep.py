"""diffusers' multistep schedulers, run on any grid of noise levels.

The solvers of DPM-Solver++ and UniPC see a path only through alpha / sigma: scaling x_t by any function of time scales
their steps with it. So x_t / (alpha + sigma) goes to a scheduler set to its straight path, where alpha' + sigma' = 1
and alpha' / sigma' is the grid's own ratio. Every grid (variance preserving, straight, alpha = 1) is run exactly, on
the noise levels of the grid instead of the scheduler's, which are written over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.samplers.base import Step
from image_diffusion.samplers.image_noise import step_noise

LEAST_ALPHA = 1e-6  # at alpha = 0, where flow matching starts, the solvers' log(alpha / sigma) is not finite


def run_scheduler(
    scheduler: Any, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams | None = None
) -> Iterator[Step]:
    """Step x [B, ...] down the grid. scheduler: made with prediction_type "sample" and use_flow_sigmas. streams: of the
    noise of a scheduler that adds some."""
    scheduler.set_timesteps(grid.num_steps)
    scheduler.sigmas = (grid.sigma / (grid.alpha + grid.sigma)).clamp(max=1 - LEAST_ALPHA).cpu()
    scheduler.set_begin_index(0)
    totals = (grid.alpha + grid.sigma).tolist()
    for i, timestep in enumerate(scheduler.timesteps):
        x0 = denoiser(x, i).x0
        noise = {} if streams is None else {"variance_noise": step_noise(streams, i, x)}
        (scaled,) = scheduler.step(x0, timestep, x / totals[i], return_dict=False, **noise)
        x = totals[i + 1] * scaled
        yield Step(x, x0)
