"""Heun's method for the probability flow ODE, dx = x0 dalpha + eps dsigma: the mean of the slopes at both ends.

Karras et al. 2022, "Elucidating the design space of diffusion-based generative models", Algorithm 1, for any
(alpha, sigma): on the straight path of flow matching it is the ODE solver of Ma et al. 2024, "SiT". Order 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from image_diffusion.core.streams import Streams
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.samplers.sampler import SamplerConfig, Step


class Heun(SamplerConfig):
    """Two network calls a step, one in the last; order 2."""

    type: Literal["heun"] = "heun"

    def calls(self, grid: Grid) -> int:
        """Twice a step, once in the last."""
        return 2 * grid.num_steps - 1

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """An Euler step, then the same step again with the mean of the predictions before and after it.

        The last step stays Euler's: it ends at no noise, where the network cannot be asked.
        """
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
