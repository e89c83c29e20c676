"""Euler's method for the probability flow ODE, dx = x0 dalpha + eps dsigma.

On the straight path of flow matching this is x + (s - t) v with v = eps - x0 (Liu et al. 2023, "Flow straight and
fast"; Ma et al. 2024, "SiT"); with alpha = 1 it is x + (sigma_s - sigma_t) eps (Karras et al. 2022,
"Elucidating the design space of diffusion-based generative models", Algorithm 1 without its correction). Order 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.samplers.base import SpacedByNoise, Step


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
