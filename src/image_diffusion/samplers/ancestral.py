"""Ancestral sampling: x_s ~ p(x_s | x_t), from each noise level t to the next lower one, s; and DDIM, which has the
same marginals with less noise, down to none.

Ho et al. 2020, "Denoising diffusion probabilistic models", Algorithm 2, with the posterior of Kingma et al. 2021,
"Variational diffusion models", appendix A.2, so that time may be discrete or continuous. Song, Meng & Ermon 2021,
"Denoising diffusion implicit models", Eq. 12 and 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.random.streams import Streams, step_noise
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, FixedVariance, Grid
from image_diffusion.process.denoiser import Variance
from image_diffusion.process.discrete import DiscreteProcess
from image_diffusion.samplers.base import NumSteps, Step, TimeDifferenceSampler, clipped, initial_scale


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


_LEAST = 1e-20  # replaces the zero variance of a level that a step starts from


@dataclass(frozen=True)
class LegacyGrid(Grid):
    """The timesteps of DALLE2-pytorch, to reproduce the samples of its published priors. stepping: the same points,
    with the noise levels that the original's steps use.

    The original uses int(linspace(-1, T, N + 1)) without the last value, where -1 stands for x0; so it starts near
    T - (T + 1) / N instead of T - 1 and makes N - 1 calls. The network receives the true timestep, and its output is
    interpreted at it, but the step is taken as if x_t had the noise of the timestep before.
    """

    stepping: Grid | None = None


class LegacyDdim(Ddim):
    """DDIM with the grid and the noise levels of DALLE2-pytorch. Use it for weights of that project only."""

    type: Literal["legacy_ddim"] = "legacy_ddim"  # type: ignore[assignment]
    eta: float = Field(1.0, ge=0, le=1)
    """Standard deviation of each step's noise, as a share of the posterior's. The original's default is 1."""

    def grid(self, process: Process) -> LegacyGrid:
        """Return the grid. Raises ValueError for another process than discrete, and for fewer than 2 or too many
        steps."""
        built = process.build()
        if not isinstance(built, DiscreteProcess):
            raise ValueError(f"The legacy_ddim sampler needs a discrete process, not {process.type}. Use ddim.")
        T, text = built.num_timesteps, str(self.num_steps)
        count = int(text) if text.isdecimal() else 0
        if not 2 <= count < T:
            raise ValueError(
                f"The legacy_ddim sampler takes from 2 to {T - 1} steps of {T} timesteps; got {self.num_steps!r}. "
                f"Use ddpm for all of them."
            )
        timesteps = torch.linspace(-1, T, count + 1)[:-1].int().flip(0)[:-1].long()
        clean = built.alpha_bar.new_ones(1)
        before = torch.cat([clean, built.alpha_bar[:-1]])

        def levels(alpha_bar: Tensor) -> tuple[Tensor, Tensor]:
            variance = torch.cat([(1 - alpha_bar[timesteps]).clamp(min=_LEAST), torch.zeros_like(clean)])
            return torch.cat([alpha_bar[timesteps], clean]).sqrt(), variance.sqrt()

        time = built.network_time(timesteps).double()
        return LegacyGrid(time, *levels(built.alpha_bar), stepping=Grid(time, *levels(before)))

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """Yield the steps of DDIM at the noise levels of the original."""
        assert isinstance(grid, LegacyGrid) and grid.stepping is not None
        yield from super().steps(denoiser, grid.stepping, x, streams)
