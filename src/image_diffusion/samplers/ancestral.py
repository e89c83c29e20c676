"""Ancestral sampling: x_s ~ p(x_s | x_t), from each noise level t to the next lower one, s.

Ho et al. 2020, "Denoising diffusion probabilistic models", Algorithm 2, with the posterior of Kingma et al. 2021,
"Variational diffusion models", appendix A.2, so that time may be discrete or continuous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Denoiser, FixedVariance, Grid
from image_diffusion.process.denoiser import Variance
from image_diffusion.samplers.base import NumSteps, Step, TimeDifferenceSampler
from image_diffusion.samplers.image_noise import step_noise


class Ddpm(TimeDifferenceSampler):
    """Ancestral sampling, with a learned or a fixed variance."""

    type: Literal["ddpm"] = "ddpm"
    num_steps: NumSteps = 250
    variance: FixedVariance | None = None
    """Variance if the network has not learned one: the posterior's, or that of the forward step (beta). Unset: the
    objective's."""

    @property
    def draws_noise(self) -> bool:
        return True

    def fitted(self, variance: Variance, bounded: bool) -> Self:
        fixed = self.variance or ("fixed_large" if variance == "fixed_large" else "fixed_small")
        return super().fitted(variance, bounded).model_copy(update={"variance": fixed})

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """x_s = mean + std z; only the mean if the step ends without noise."""
        for i in range(grid.num_steps):
            denoised, step = denoiser(x, i), grid.steps.at(i, x)
            x = step.reverse_mean(denoised, x)
            if step.variance > 0:
                log_variance = step.reverse_log_variance(denoised, self.variance or "fixed_small")
                x = x + (0.5 * log_variance).exp() * step_noise(streams, i, x)
            yield Step(x, denoised.x0)
