"""DPM-Solver++ (2M): the probability flow ODE in log(alpha / sigma), with x0 extrapolated from the last two steps.

Lu et al. 2022, "DPM-Solver++: Fast solver for guided sampling of diffusion probabilistic models", Algorithm 2, and its
form for the reverse SDE, SDE-DPM-Solver++ (2M).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.samplers.base import NumSteps, SpacedByNoise, Step
from image_diffusion.samplers.diffusers_multistep import run_scheduler


class DpmSolver(SpacedByNoise):
    """One network call a step, order 2: diffusers' DPMSolverMultistepScheduler on our noise levels."""

    type: Literal["dpm_solver"] = "dpm_solver"
    num_steps: NumSteps = 20
    adds_noise: bool = False
    """Solve the reverse SDE instead: the noise of later steps covers the errors of earlier ones."""

    @property
    def draws_noise(self) -> bool:
        return self.adds_noise

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """The first and the last step are of order 1."""
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

        algorithm = "sde-dpmsolver++" if self.adds_noise else "dpmsolver++"
        scheduler = DPMSolverMultistepScheduler(
            prediction_type="sample", use_flow_sigmas=True, solver_order=2, algorithm_type=algorithm
        )
        return run_scheduler(scheduler, denoiser, grid, x, streams if self.adds_noise else None)
