"""Solvers of the probability flow ODE, dx = x0 dalpha + eps dsigma.

Euler's method, order 1: on the straight path of flow matching it is x + (s - t) v with v = eps - x0 (Liu et al. 2023,
"Flow straight and fast"; Ma et al. 2024, "SiT"); with alpha = 1 it is x + (sigma_s - sigma_t) eps (Karras et al. 2022,
"Elucidating the design space of diffusion-based generative models", Algorithm 1 without its correction).

Heun's method, order 2, takes the mean of the slopes at both ends: Algorithm 1 of Karras et al. for any (alpha, sigma);
on the straight path it is the ODE solver of SiT. With `s_churn`, on the edm process, it is their Algorithm 2: each step
first adds noise, and starts from the larger sigma. The grid then has two points per step; the initial noise includes
the noise that the first step would add.

The flow map takes one, two or four steps by average velocities, x_r = x_t - (t - r) u(x_t, r, t), of a network that
predicts them: Geng et al. 2025, "Mean flows for one-step generative modeling", arXiv:2505.13447.

DPM-Solver++ and UniPC are diffusers' multistep schedulers, run on any grid of noise levels. DPM-Solver++ (2M) solves
the ODE in log(alpha / sigma), with x0 extrapolated from the last two steps: Lu et al. 2022, "DPM-Solver++: Fast solver
for guided sampling of diffusion probabilistic models", Algorithm 2, and its form for the reverse SDE, SDE-DPM-Solver++
(2M). UniPC is a multistep predictor; each step is corrected with the prediction after it, without a further call: Zhao
et al. 2023, "UniPC: A unified predictor-corrector framework for fast sampling of diffusion models", in its form that
predicts x0, with B(h) = exp(h) - 1. Both depend on a path only through alpha / sigma: scaling x_t by a function of time
scales their steps equally. So x_t / (alpha + sigma) is passed to a scheduler with a straight path, where alpha' +
sigma' = 1 and alpha' / sigma' is the grid's ratio. Every grid (variance preserving, straight, alpha = 1) is run
exactly: its noise levels overwrite those of the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams, step_noise
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.denoiser import Variance
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.base import NumSteps, SamplerConfig, SpacedByNoise, Step


class Euler(SpacedByNoise):
    """Euler's method: one network call per step, order 1."""

    type: Literal["euler"] = "euler"

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """x_s = x_t + (alpha_s - alpha_t) x0 + (sigma_s - sigma_t) eps."""
        d_alphas, d_sigmas = grid.alpha.diff().tolist(), grid.sigma.diff().tolist()
        for i, (d_alpha, d_sigma) in enumerate(zip(d_alphas, d_sigmas, strict=True)):
            denoised = denoiser(x, i)
            x = x + d_alpha * denoised.x0 + d_sigma * denoised.eps
            yield Step(x, denoised.x0)


class Heun(SpacedByNoise):
    """Heun's method: two network calls per step, one in the last step; order 2."""

    type: Literal["heun"] = "heun"
    s_churn: float = Field(0.0, ge=0)
    """Total amount of noise that the steps add (Karras et al. 2022, section 4); 0: none. For the process edm."""
    s_min: float = Field(0.0, ge=0)
    """Sigma below which no noise is added."""
    s_max: float | None = Field(None, gt=0)
    """Sigma above which no noise is added; unset: no such bound."""
    s_noise: float = Field(1.0, gt=0, le=1e6)
    """Factor of the standard deviation of the added noise."""

    @property
    def draws_noise(self) -> bool:
        return self.s_churn > 0

    @property
    def can_start_anywhere(self) -> bool:
        """False with churn: at every other point of the grid a step ends, and its noise is not yet added."""
        return self.s_churn == 0

    def calls(self, grid: Grid) -> int:
        """Return the number of network calls: two per step, one in the last step."""
        return grid.num_steps if self.s_churn else 2 * grid.num_steps - 1

    def grid(self, process: Process) -> Grid:
        """Return the grid of points, as for every sampler; with churn, two points per step: sigma before and after
        noise is added; the first step starts after it. Raises ValueError for churn on another process than edm."""
        if not self.s_churn:
            return super().grid(process)
        if not isinstance(process, Edm):
            raise ValueError(
                f"s_churn is {self.s_churn:g}, but only the process edm has noise levels between its steps; this "
                f"one is {process.type}. Leave s_churn out."
            )
        built = process.build()
        plain = super().grid(process).sigma[:-1]
        inside = (plain >= self.s_min) & (plain <= (math.inf if self.s_max is None else self.s_max))
        raised = plain * (1 + inside * min(self.s_churn / len(plain), math.sqrt(2) - 1))  # t^ of Algorithm 2
        return built.grid_of(torch.stack([plain, raised], 1).flatten()[1:])

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """An Euler step, then the same step again with the mean of the predictions before and after it.

        The last step is Euler's: it ends without noise, where the network cannot be evaluated.
        """
        if self.s_churn:
            yield from self._churned(denoiser, grid, x, streams)
            return
        d_alphas, d_sigmas = grid.alpha.diff().tolist(), grid.sigma.diff().tolist()
        last = grid.num_steps - 1
        for i, (d_alpha, d_sigma) in enumerate(zip(d_alphas, d_sigmas, strict=True)):
            first = denoiser(x, i)
            x0, eps = first.x0, first.eps
            if i < last:
                second = denoiser(x + d_alpha * x0 + d_sigma * eps, i + 1)
                x0, eps = (x0 + second.x0) / 2, (eps + second.eps) / 2
            x = x + d_alpha * x0 + d_sigma * eps
            yield Step(x, first.x0)

    def _churned(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """Yield the steps from points 0, 2, 4, … of the grid, which include the added noise; steps end at points 1, 3,
        …."""
        sigmas = grid.sigma.tolist()
        last = grid.num_steps - 1
        for i in range(0, last + 1, 2):
            if i > 0:
                added = math.sqrt(max(sigmas[i] ** 2 - sigmas[i - 1] ** 2, 0.0))
                if added:
                    x = x + added * self.s_noise * step_noise(streams, i // 2, x)
            first = denoiser(x, i)
            eps, d_sigma = first.eps, sigmas[i + 1] - sigmas[i]
            if i < last:
                eps = (eps + denoiser(x + d_sigma * eps, i + 1).eps) / 2
            x = x + d_sigma * eps
            yield Step(x, first.x0)


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
