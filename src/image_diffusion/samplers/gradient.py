"""Guidance by the gradient of log p(condition | x_t), such as a classifier's: denoisers that climb it as well.

Dhariwal & Nichol 2021, "Diffusion models beat GANs on image synthesis". To clamp x0 before the gradient acts, as
there, wrap `clipped(denoiser, grid)` and leave the sampler's clip_denoised off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from image_diffusion.process.grid import Denoised, Denoiser, Grid

Gradient = Callable[[Tensor, int], Tensor]
"""gradient(x_t [B, ...], i) -> [B, ...] at point i of the grid, times the wanted strength."""


def with_score_gradient(denoiser: Denoiser, grid: Grid, gradient: Gradient) -> Denoiser:
    """For deterministic samplers (Algorithm 2): eps - sigma gradient, and the x0 that follows from it."""
    alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()

    def guided_denoiser(x: Tensor, i: int) -> Denoised:
        denoised = denoiser(x, i)
        eps = denoised.eps - sigmas[i] * gradient(x, i)
        return replace(denoised, x0=(x - sigmas[i] * eps) / alphas[i], eps=eps)

    return guided_denoiser


def with_mean_gradient(
    denoiser: Denoiser, grid: Grid, gradient: Gradient, variance: Literal["fixed_small", "fixed_large"] = "fixed_small"
) -> Denoiser:
    """For the ancestral sampler (Algorithm 1): its mean moved by variance * gradient.

    variance: as the sampler's, used where the network has not learned one.
    """

    def guided_denoiser(x: Tensor, i: int) -> Denoised:
        denoised, step = denoiser(x, i), grid.steps.at(i, x)
        fixed = step.variance if variance == "fixed_small" else step.log_large_variance.exp()
        scale = fixed if denoised.log_variance is None else denoised.log_variance.exp()
        return replace(denoised, mean=step.reverse_mean(denoised, x) + scale * gradient(x, i))

    return guided_denoiser
