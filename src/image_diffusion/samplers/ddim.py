"""DDIM: the same marginals as the ancestral sampler with less noise, down to none.

Song, Meng & Ermon 2021, "Denoising diffusion implicit models", Eq. 12 and 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.samplers.base import Step, TimeDifferenceSampler, clipped, initial_scale
from image_diffusion.samplers.image_noise import step_noise


class Ddim(TimeDifferenceSampler):
    """DDIM. With eta 0 it is deterministic and can be run backwards; with eta 1 it is the ancestral sampler."""

    type: Literal["ddim"] = "ddim"
    eta: float = Field(0.0, ge=0, le=1)
    """Standard deviation of each step's noise, as a share of the posterior's."""

    @property
    def draws_noise(self) -> bool:
        return self.eta > 0

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """x_s = alpha_s x0 + sqrt(sigma_s^2 - std^2) eps + std z."""
        alpha_s, sigma_s = grid.target or (grid.alpha[1:], grid.sigma[1:])
        variance = self.eta**2 * grid.steps.variance
        eps_weights, stds = (sigma_s**2 - variance).clamp(min=0).sqrt().tolist(), variance.sqrt().tolist()
        for i, alpha in enumerate(alpha_s.tolist()):
            denoised = denoiser(x, i)
            x = alpha * denoised.x0 + eps_weights[i] * denoised.eps
            if stds[i] > 0:
                x = x + stds[i] * step_noise(streams, i, x)
            yield Step(x, denoised.x0)

    def encode(self, denoiser: Denoiser, grid: Grid, x0: Tensor) -> Tensor:
        """Return the noise [B, ...] from which images x0 [B, ...] would be sampled, up to an error of order 1 in the
        step.

        Runs the ODE backwards, from least noise to most; x0 stands for x_t at the grid's least noise level, the last
        one that the network was trained for. Raises ValueError unless eta is 0.
        """
        if self.eta != 0:
            raise ValueError(f"eta is {self.eta}, but only a deterministic sampler can be run backwards. Use eta 0.")
        denoiser = clipped(denoiser, grid) if self.clip_denoised else denoiser
        alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()
        x: Tensor = alphas[-1] * x0
        for i in reversed(range(1, grid.num_steps)):
            denoised = denoiser(x, i)
            x = alphas[i - 1] * denoised.x0 + sigmas[i - 1] * denoised.eps
        return x / initial_scale(grid)
