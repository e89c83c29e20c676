"""Steps by average velocities, x_r = x_t - (t - r) u(x_t, r, t), of a network that predicts them: one, two or four.

Geng et al. 2025, "Mean flows for one-step generative modeling", arXiv:2505.13447.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.denoiser import Variance
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.base import NumSteps, SamplerConfig, Step
from image_diffusion.samplers.euler import Euler


class FlowMap(SamplerConfig):
    """Sampler with one network call per step, conditioned on the length of the step. If the network is exact, so is the
    sampler, with any number of steps."""

    needs_average_velocity: ClassVar[bool] = True

    type: Literal["flow_map"] = "flow_map"
    num_steps: NumSteps = 1

    def grid(self, process: Process) -> Grid:
        """Return the grid of points, as for every sampler, with the intervals. Raises ValueError for another process
        than flow."""
        if not isinstance(process, Flow):
            raise ValueError(
                f"The flow_map sampler needs average velocities, and the process {process.type} has none. Use it with "
                "process flow and objective mean_flow."
            )
        grid = super().grid(process)
        return replace(grid, interval=-grid.sigma.diff() * process.time_scale)

    def fitted(self, variance: Variance, bounded: bool) -> Self:
        """Return the sampler fitted to the model, without clamping unless it is set: the x0 of a step is the end point
        of its velocity, not an estimate of the image."""
        return super().fitted(variance, bounded=False)

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """Euler's steps, with average velocities."""
        return Euler().steps(denoiser, grid, x, streams)
