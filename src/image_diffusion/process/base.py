"""Interface of the noise processes for objectives and samplers; and the noise levels that a sampler visits, with the
steps between them.

In every process here x_t = alpha_t x0 + sigma_t eps, so a sequence of pairs (alpha, sigma) is all that a sampler needs
to know. The posterior of a step is that of Kingma et al. 2021, "Variational diffusion models", appendix A.2: it does
not assume alpha^2 + sigma^2 = 1, and for the discrete process it is the posterior of Ho et al. 2020, equations 6 and 7.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Network


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


Respacing = str | int | Sequence[int]
"""Timesteps to keep: their number, 250 or "250"; numbers in equal sections, [10, 15, 20] or "10,15,20"; "ddim50" with
DDIM's integer stride; "" for all."""


class NoiseProcess(ABC):
    """x_t = alpha_t x0 + sigma_t eps. The times of a batch are one tensor t [B], integers or reals."""

    @abstractmethod
    def draw(self, streams: Streams) -> Tensor:
        """Draw a time for each sample, as in training. [B]."""

    def uniform(self) -> NoiseProcess:
        """Return the process with times drawn uniformly."""
        return self

    @abstractmethod
    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma at times [B]. Float64 [B] each."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """Return the time input of the network for times [B]. Float32 [B]."""

    def network_input(self, x_t: Tensor) -> Tensor:
        """Return the input of the network for x_t [B, …]."""
        return x_t

    def preconditioned(self, network: Network) -> Network:
        """Wrap a network whose input and output are not x_t and a prediction of this process."""
        return network

    def fraction(self, t: Tensor) -> Tensor:
        """Return the position of times [B] on the noise scale, by default the times. Float64 [B] in [0, 1)."""
        return t.double().clamp(max=1 - 2**-24)

    @abstractmethod
    def grid(self, num_steps: Respacing) -> Grid:
        """Return the points to sample at. Raises ValueError for steps that the process does not support."""


def broadcast(levels: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma [B] in the shape and type that multiply x [B, …]."""
    alpha, sigma = (level.view(-1, *[1] * (x.ndim - 1)).to(x.dtype) for level in levels)
    return alpha, sigma


def count_steps(num_steps: Respacing, process: str) -> int:
    """Return the number of steps. Raises ValueError for anything else: a real time has no respacing."""
    text = str(num_steps)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"The {process} process takes a number of steps, at least 1; got {num_steps!r}. Use 50, say.")
    return int(text)


def evenly(num_steps: int, last_step: float | None = None) -> Tensor:
    """Return times from 1 to 0, float64 [num_steps + 1]. last_step: size of the last step; None: as the others."""
    if last_step is None:
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return torch.cat([torch.linspace(1, last_step, num_steps, dtype=torch.float64), torch.zeros(1).double()])


def karras_sigmas(first: float, last: float, num_steps: int) -> Tensor:
    """Return noise levels sigma / alpha from `first` to `last`, evenly spaced in their seventh root. Float64
    [num_steps].

    Karras et al. 2022, "Elucidating the design space of diffusion-based generative models": steps become shorter
    towards the data; section 3 finds a rho of 5 to 10 best for images.
    """
    rho = 7.0
    return torch.linspace(first ** (1 / rho), last ** (1 / rho), num_steps, dtype=torch.float64) ** rho
