"""DPM-Solver++ (2M): the probability flow ODE in log(alpha / sigma), with x0 extrapolated from the last two steps.

Lu et al. 2022, "DPM-Solver++: Fast solver for guided sampling of diffusion probabilistic models", Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from image_diffusion.core.streams import Streams
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.samplers.multistep import run_scheduler
from image_diffusion.samplers.sampler import NumSteps, SamplerConfig, Step


class DpmSolver(SamplerConfig):
    """One network call a step, order 2: diffusers' DPMSolverMultistepScheduler on our noise levels."""

    type: Literal["dpm_solver"] = "dpm_solver"
    num_steps: NumSteps = 20

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """The first and the last step are of order 1."""
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

        scheduler = DPMSolverMultistepScheduler(prediction_type="sample", use_flow_sigmas=True, solver_order=2)
        return run_scheduler(scheduler, denoiser, grid, x)
