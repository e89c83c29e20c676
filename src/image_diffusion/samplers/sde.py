"""The reverse SDE by Euler and Maruyama's method: dx = (v - D score) dt + sqrt(2 D) dw, with any diffusion D of t.

Ma et al. 2024, "SiT: Exploring flow and diffusion-based generative models with scalable interpolant transformers",
section 2, whose w_t is 2 D here; the forms of D, their defaults and the last step are those of its published code.
Every D has the marginals of the process (Albergo et al. 2023, "Stochastic interpolants", section 2.3).

x_t / (alpha + sigma) lies on the straight path at t = sigma / (alpha + sigma): every process is sampled on it. There
the published form linear equals sigma, and the published last step of Euler equals Tweedie's. Unlike the published
code, no step removes more noise than there is, so D may be infinite at t = 1: where D dt > t^2, D is t^2 / dt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams, step_noise
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.base import NumSteps, SpacedByNoise, Step

LAST_NOISE = 0.04  # sigma / (alpha + sigma) where the last step begins, the published size on the straight path

Form = Literal["constant", "sbdm", "sigma", "decreasing", "increasing_decreasing"]

FORMS: dict[Form, Callable[[float, float], float]] = {
    "constant": lambda t, norm: norm,
    "sbdm": lambda t, norm: norm * t / (1 - t) if t < 1 else math.inf,
    "sigma": lambda t, norm: norm * t,
    "decreasing": lambda t, norm: 0.25 * (1 - norm * math.cos(math.pi * t)) ** 2,
    "increasing_decreasing": lambda t, norm: norm * math.sin(math.pi * t) ** 2,
}
"""D as a function of the time t, which is 1 at pure noise, and of `norm`."""


class Sde(SpacedByNoise):
    """Euler-Maruyama: one network call per step, order 1 in distribution; the last step draws no noise."""

    type: Literal["sde"] = "sde"
    num_steps: NumSteps = 250
    diffusion: Form = "sigma"
    """Amount of noise that each step removes and adds again, as a function of time: constant; sbdm, that of score-based
    diffusion (Song et al. 2021); sigma; decreasing towards the image; or increasing_decreasing, zero at both ends."""
    norm: float = Field(1.0, gt=0)
    """Magnitude of the diffusion."""
    last_step: Literal["mean", "tweedie"] = "mean"
    """Result of the last step. mean: the mean of the step, without the noise that it would add; tweedie: the predicted
    x0. With a single step, always the predicted x0."""
    last_step_size: float | None = Field(None, gt=0, lt=1)
    """Size of the last step in time, before any shift. Unset: it begins where sigma / (alpha + sigma) is 0.04, so its
    size is 0.04 for a flow without shift, as published. For the processes discrete and edm their least noise fixes the
    size, and it must be unset."""

    @property
    def draws_noise(self) -> bool:
        return True

    def grid(self, process: Process) -> Grid:
        """Return the grid of points, as in the base class. Raises ValueError for a last_step_size if the process fixes
        it."""
        process, size = self.shifted(process), self.last_step_size
        if isinstance(process, Flow | Continuous):
            built = process.build()
            return built.grid(self.num_steps, last_step=built.time_at(LAST_NOISE) if size is None else size)
        if size is not None:
            raise ValueError(
                f"last_step_size is {size:g}, but the process {process.type} defines where noise ends. Leave it out."
            )
        return super().grid(process)

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """y_s = y_t - (v + D eps / t) dt + sqrt(2 D dt) z of y = x / (alpha + sigma), with v = eps - x0."""
        total = grid.alpha + grid.sigma
        times, totals = (grid.sigma / total).tolist(), total.tolist()
        for i, (t, s) in enumerate(pairwise(times)):
            denoised, last = denoiser(x, i), i == grid.num_steps - 1
            diffused = min(FORMS[self.diffusion](t, self.norm) * (t - s), t**2)  # D dt
            if last and (self.last_step == "tweedie" or i == 0):
                y = denoised.x0
            else:
                y = x / totals[i] + (t - s) * denoised.x0 - (t - s + diffused / t) * denoised.eps
            if not last:
                y = y + math.sqrt(2 * diffused) * step_noise(streams, i, x)
            x = totals[i + 1] * y
            yield Step(x, denoised.x0)
