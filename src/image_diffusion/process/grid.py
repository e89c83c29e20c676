"""Noise levels and the steps between them: all that a sampler needs to know of a process.

In every process here x_t = alpha_t x0 + sigma_t eps, so a sequence of pairs (alpha, sigma) is sufficient. The posterior
of a step is that of Kingma et al. 2021, "Variational diffusion models", appendix A.2: it does not assume alpha^2 +
sigma^2 = 1, and for the discrete process it is the posterior of Ho et al. 2020, equations 6 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denoised:
    """Estimates of a clean sample x0 from its noisy form x_t = alpha x0 + sigma eps.

    x0, eps: [B, C, H, W], estimates that agree with x_t. log_variance: [B, C, H, W], of p(x_s | x_t), if the network
    has learned it. mean: [B, C, H, W], of p(x_s | x_t), if the network predicts it (`previous_x`); None: the
    posterior's mean at x0.
    """

    x0: Tensor
    eps: Tensor
    log_variance: Tensor | None = None
    mean: Tensor | None = None


FixedVariance = Literal["fixed_small", "fixed_large"]
"""Fixed variance of p(x_s | x_t): the posterior's, or that of the forward step (beta)."""

Denoiser = Callable[[Tensor, int], Denoised]
"""(x_t, i) -> Denoised, where x_t lies at point i of a grid."""


@dataclass(frozen=True)
class Steps:
    """Steps x_t -> x_s to less noise, one per entry of each tensor; all tensors have the same shape, float64.

    q(x_s | x_t, x0) = N(x0_weight x0 + x_t_weight x_t, variance). alpha, sigma: the noise level of x_t. log_variance:
    log of `variance`; if that is zero, the value of the neighbouring step with more noise. log_beta: log of the
    variance of q(x_t | x_s).
    """

    alpha: Tensor
    sigma: Tensor
    x0_weight: Tensor
    x_t_weight: Tensor
    variance: Tensor
    log_variance: Tensor
    log_beta: Tensor

    @classmethod
    def between(cls, alpha: Tensor, sigma: Tensor, next_alpha: Tensor, next_sigma: Tensor) -> Steps:
        """Return the steps from (alpha, sigma) to (next_alpha, next_sigma), each [N], the most noise first."""
        ratio = alpha / next_alpha  # alpha_{t|s}
        beta = sigma**2 - ratio**2 * next_sigma**2  # sigma^2_{t|s}
        variance = beta * next_sigma**2 / sigma**2
        log_beta = beta.log()
        log_variance = variance.log()
        for i in (variance <= 0).nonzero().flatten().tolist():
            log_variance[i] = log_variance[i - 1] if i > 0 else log_beta[i]
        return cls(
            alpha=alpha,
            sigma=sigma,
            x0_weight=next_alpha * beta / sigma**2,
            x_t_weight=ratio * next_sigma**2 / sigma**2,
            variance=variance,
            log_variance=log_variance,
            log_beta=log_beta,
        )

    @property
    def log_large_variance(self) -> Tensor:
        """Logarithm of the variance `fixed_large`: beta, but the posterior's in the step that ends without noise."""
        return torch.where(self.variance > 0, self.log_beta, self.log_variance)

    def at(self, index: int | Tensor, x: Tensor) -> Steps:
        """Return the steps of x [B, …], broadcastable to it. index: one for all samples, or int64 [B]."""
        shape = (-1,) + (1,) * (x.ndim - 1) if isinstance(index, Tensor) else ()
        return self._map(lambda values: values[index].view(shape).to(x.dtype))

    def to(self, device: torch.device) -> Steps:
        """Move the steps to another device."""
        return self._map(lambda values: values.to(device))

    def flip(self) -> Steps:
        """Reverse the order of the steps."""
        return self._map(lambda values: values.flip(0))

    def posterior_mean(self, x0: Tensor, x_t: Tensor) -> Tensor:
        """Return the mean of q(x_s | x_t, x0)."""
        return self.x0_weight * x0 + self.x_t_weight * x_t

    def reverse_mean(self, denoised: Denoised, x_t: Tensor) -> Tensor:
        """Return the mean of p(x_s | x_t)."""
        return self.posterior_mean(denoised.x0, x_t) if denoised.mean is None else denoised.mean

    def reverse_log_variance(self, denoised: Denoised, fixed: FixedVariance) -> Tensor:
        """Return the log of the variance of p(x_s | x_t). fixed: the variance if the network learned none."""
        if denoised.log_variance is not None:
            return denoised.log_variance
        return self.log_large_variance if fixed == "fixed_large" else self.log_variance

    def _map(self, function: Callable[[Tensor], Tensor]) -> Steps:
        return Steps(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Grid:
    """Points that a sampler visits, from most noise to none. Float64, on the CPU.

    time: [N], the network's time input at each point but the last. alpha, sigma: [N + 1], the noise levels; the last is
    the clean sample, alpha 1 and sigma 0. target: the noise level at which a step of the ancestral sampler ends, if it
    is not the next point, (alpha [N], sigma [N]); see `Continuous.grid`. interval: [N], the length of each step, in the
    network's time, if the network is conditioned on it.
    """

    time: Tensor
    alpha: Tensor
    sigma: Tensor
    target: tuple[Tensor, Tensor] | None = None
    interval: Tensor | None = None

    @property
    def num_steps(self) -> int:
        """Return N, the number of network calls of a first-order sampler."""
        return len(self.time)

    def starting_at(self, i: int) -> Grid:
        """Return the grid from point i on."""
        target = None if self.target is None else (self.target[0][i:], self.target[1][i:])
        interval = None if self.interval is None else self.interval[i:]
        return Grid(self.time[i:], self.alpha[i:], self.sigma[i:], target, interval)

    @cached_property
    def steps(self) -> Steps:
        """The steps from each point to the next (to `target`, where given), [N]."""
        next_alpha, next_sigma = self.target or (self.alpha[1:], self.sigma[1:])
        return Steps.between(self.alpha[:-1], self.sigma[:-1], next_alpha, next_sigma)
