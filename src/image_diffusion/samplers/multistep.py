"""DPM-Solver++ and UniPC: diffusers' multistep schedulers, run on any grid of noise levels.

DPM-Solver++ (2M) solves the probability flow ODE in log(alpha / sigma), with x0 extrapolated from the last two steps:
Lu et al. 2022, "DPM-Solver++: Fast solver for guided sampling of diffusion probabilistic models", Algorithm 2, and its
form for the reverse SDE, SDE-DPM-Solver++ (2M). UniPC is a multistep predictor; each step is corrected with the
prediction after it, without a further call: Zhao et al. 2023, "UniPC: A unified predictor-corrector framework for fast
sampling of diffusion models", in its form that predicts x0, with B(h) = exp(h) - 1.

Both depend on a path only through alpha / sigma: scaling x_t by a function of time scales their steps equally. So x_t /
(alpha + sigma) is passed to a scheduler with a straight path, where alpha' + sigma' = 1 and alpha' / sigma' is the
grid's ratio. Every grid (variance preserving, straight, alpha = 1) is run exactly: its noise levels overwrite those of
the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.discrete import Discrete
from image_diffusion.samplers.base import NumSteps, SpacedByNoise, Step
from image_diffusion.samplers.image_noise import step_noise

LEAST_ALPHA = 1e-6  # at alpha = 0, where flow matching starts, the solvers' log(alpha / sigma) is not finite


class MultistepSolver(SpacedByNoise):
    """Solver of order 2, whose last step must not be far longer in log(alpha / sigma) than the one before."""

    num_steps: NumSteps = 20

    def grid(self, process: Process) -> Grid:
        """Return the grid of points, as in the base class. A plain number of steps, evenly in time, leaves out timestep
        0 of a discrete process: it has so little noise that a step of order 2 to it overshoots."""
        shifted = self.shifted(process)
        if isinstance(shifted, Discrete) and self.spacing == "time" and isinstance(self.num_steps, int):
            return shifted.build().solver_grid(self.num_steps)
        return super().grid(process)


class DpmSolver(MultistepSolver):
    """DPM-Solver++: one network call per step, order 2; diffusers' DPMSolverMultistepScheduler on the grid's noise
    levels."""

    type: Literal["dpm_solver"] = "dpm_solver"
    adds_noise: bool = False
    """Solve the reverse SDE instead of the ODE: the noise of later steps covers the errors of earlier ones."""

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


class UniPc(MultistepSolver):
    """UniPC: one network call per step, order 2 and corrected; diffusers' UniPCMultistepScheduler on the grid's noise
    levels."""

    type: Literal["unipc"] = "unipc"

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """The last step is of order 1."""
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        scheduler = UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=True, solver_order=2)
        return run_scheduler(scheduler, denoiser, grid, x)


def run_scheduler(
    scheduler: Any, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams | None = None
) -> Iterator[Step]:
    """Step x [B, ...] along the grid. scheduler: made with prediction_type "sample" and use_flow_sigmas. streams: of
    the noise, if the scheduler adds any."""
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
