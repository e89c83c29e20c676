"""The variational bound on -log p(x0), in bits per dimension (Ho et al. 2020, equation 5; Nichol & Dhariwal 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from image_diffusion.process.base import Denoiser, FixedVariance, Grid, Steps


def approximate_normal_cdf(z: Tensor) -> Tensor:
    """Return the standard normal's cumulative distribution, to 1e-3: that of published results (Page 1977)."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def discretized_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log of the probability that a Gaussian falls into the 8-bit bin of x, in nats, element by element.

    x in [-1, 1]: bins are 2/255 wide, the outer ones open (Ho et al. 2020, equation 13). Probabilities are at least
    1e-12.
    """
    centred, inverse_std, half_bin = x - mean, torch.exp(-log_std), 1 / 255
    upper = approximate_normal_cdf(inverse_std * (centred + half_bin))
    lower = approximate_normal_cdf(inverse_std * (centred - half_bin))
    probability = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return probability.clamp(min=1e-12).log()


def normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL(N(mean1, …) || N(mean2, …)) in nats, element by element."""
    ratio = log_variance1 - log_variance2
    return 0.5 * (-1 - ratio + ratio.exp() + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def variational_bound(
    x0: Tensor, x_t: Tensor, step: Steps, mean: Tensor, log_variance: Tensor, ends_clean: Tensor
) -> Tensor:
    """Return one term of the bound for each sample, in bits per dimension: [B].

    mean, log_variance: of p(x_s | x_t), broadcastable to x_t [B, …]. ends_clean: bool [B], true if s has no noise: the
    term is then -log p(x0 | x_t), otherwise KL(q(x_s | x_t, x0) || p).
    """
    kl = normal_kl(step.posterior_mean(x0, x_t), step.log_variance, mean, log_variance)
    nll = -discretized_gaussian_log_likelihood(x0, mean, 0.5 * log_variance)
    return torch.where(ends_clean, _bits(nll), _bits(kl))


def prior_bound(x0: Tensor, grid: Grid) -> Tensor:
    """KL(q(x_T | x0) || N(0, 1)) for each sample, in bits per dimension: [B]."""
    alpha, sigma = grid.alpha[0].to(x0.dtype), grid.sigma[0].to(x0.dtype)
    zero = torch.zeros((), dtype=x0.dtype, device=x0.device)
    return _bits(normal_kl(alpha * x0, 2 * sigma.log(), zero, zero))


@dataclass(frozen=True)
class BitsPerDim:
    """The bound on -log2 p(x0) per dimension, and its terms.

    total, prior: [B]. terms, x0_mse, eps_mse: [B, N], for each step of the grid, the most noise first; total is the sum
    of terms and prior.
    """

    total: Tensor
    prior: Tensor
    terms: Tensor
    x0_mse: Tensor
    eps_mse: Tensor


def bits_per_dim(
    denoiser: Denoiser,
    grid: Grid,
    x0: Tensor,
    noise: Callable[[int], Tensor],
    variance: FixedVariance = "fixed_small",
) -> BitsPerDim:
    """Evaluate the bound for x0 [B, C, H, W], pixels in [-1, 1], with one noise for every step of the grid.

    noise: point i of the grid -> eps [B, C, H, W]. variance: of p(x_s | x_t), if the network has not learned one.
    """
    terms, x0_mse, eps_mse = [], [], []
    for i in range(grid.num_steps):
        eps, step = noise(i), grid.steps.at(i, x0)
        x_t = step.alpha * x0 + step.sigma * eps
        denoised = denoiser(x_t, i)
        ends_clean = torch.full((len(x0),), bool(grid.steps.variance[i] <= 0), device=x0.device)
        mean, log_variance = step.reverse_mean(denoised, x_t), step.reverse_log_variance(denoised, variance)
        terms.append(variational_bound(x0, x_t, step, mean, log_variance, ends_clean))
        x0_mse.append((denoised.x0 - x0).square().flatten(1).mean(1))
        eps_mse.append((denoised.eps - eps).square().flatten(1).mean(1))
    stacked, prior = torch.stack(terms, 1), prior_bound(x0, grid)
    return BitsPerDim(stacked.sum(1) + prior, prior, stacked, torch.stack(x0_mse, 1), torch.stack(eps_mse, 1))


def _bits(nats: Tensor) -> Tensor:
    """Return the mean over all but the first dimension, in bits."""
    return nats.flatten(1).mean(1) / math.log(2)
