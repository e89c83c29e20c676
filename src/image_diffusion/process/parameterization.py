"""Parameterizations of a network's output: eps, x0, v, velocity or previous_x, which are equivalent, and a learned
variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from image_diffusion.process.grid import Denoised, Steps

Prediction = Literal["eps", "x0", "v", "velocity", "previous_x"]
"""v = alpha eps - sigma x0 (Salimans & Ho 2022); velocity = eps - x0 (Lipman et al. 2023, Liu et al. 2023);
previous_x: the mean of the next, less noisy x (Ho et al. 2020, section 3.2)."""

Variance = Literal["fixed_small", "fixed_large", "learned", "learned_range"]
"""Variance of p(x_s | x_t). fixed_small: the posterior's; fixed_large: beta; learned: its logarithm is the second half
of the output's channels; learned_range: the second half, from -1 to 1, interpolates between the logarithms of the two
fixed ones (Nichol & Dhariwal 2021, equation 15)."""

LEARNED_VARIANCES = ("learned", "learned_range")

_SMALLEST = 1e-10  # lower bound of alpha and sigma as divisors


def target(prediction: Prediction, x0: Tensor, eps: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the target of a network that predicts eps, x0, v or velocity. alpha, sigma: broadcastable to x0."""
    match prediction:
        case "eps":
            return eps
        case "x0":
            return x0
        case "v":
            return alpha * eps - sigma * x0
        case "velocity":
            return eps - x0
        case "previous_x":
            raise AssertionError("the target of previous_x is the posterior's mean, which needs the step")


def to_x0_and_eps(
    prediction: Prediction, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return x0 and eps from the network's output for x_t = alpha x0 + sigma eps, for any alpha and sigma."""
    match prediction:
        case "eps":
            return (x_t - sigma * output) / alpha.clamp(min=_SMALLEST), output
        case "x0":
            return output, (x_t - alpha * output) / sigma.clamp(min=_SMALLEST)
        case "v":
            squares = alpha**2 + sigma**2
            return (alpha * x_t - sigma * output) / squares, (sigma * x_t + alpha * output) / squares
        case "velocity":
            total = alpha + sigma
            return (x_t - sigma * output) / total, (x_t + alpha * output) / total
        case "previous_x":
            raise AssertionError("x0 from previous_x needs the step")


def split_output(output: Tensor, channels: int, variance: Variance) -> tuple[Tensor, Tensor | None]:
    """Return the prediction [B, C, …] and the raw values of a learned variance [B, C, …].

    Raises ValueError where the network's output has another number of channels.
    """
    learned = variance in LEARNED_VARIANCES
    expected = 2 * channels if learned else channels
    if output.shape[1] != expected:
        raise ValueError(
            f"The network returns {output.shape[1]} channels for x of {channels}, but variance {variance} needs "
            f"{expected}. Build the network with {expected} output channels, or set variance to "
            f"{'fixed_small or fixed_large' if learned else 'learned_range'}."
        )
    return (output[:, :channels], output[:, channels:]) if learned else (output, None)


def log_variance(raw: Tensor | None, variance: Variance, step: Steps) -> Tensor:
    """Return the log of the variance of p(x_s | x_t), broadcastable to x_t. raw: second half of the output."""
    match variance:
        case "fixed_small":
            return step.log_variance
        case "fixed_large":
            return step.log_large_variance
        case "learned":
            assert raw is not None
            return raw
        case "learned_range":
            assert raw is not None
            fraction = (raw + 1) / 2
            return fraction * step.log_beta + (1 - fraction) * step.log_variance


def read_output(
    output: Tensor,
    x_t: Tensor,
    step: Steps,
    prediction: Prediction,
    variance: Variance,
    restrict: Callable[[Tensor], Tensor] | None = None,
) -> Denoised:
    """Return the estimates of x0 in the output for x_t [B, C, …]. step: of each sample (`Steps.at`). restrict: function
    applied to the predicted x0, such as `clamp`; eps is then computed from the result. The log variance is set if it is
    learned. Raises ValueError where the channels do not fit (`split_output`).
    """
    predicted, raw = split_output(output, x_t.shape[1], variance)
    if prediction == "previous_x":
        x0 = (predicted - step.x_t_weight * x_t) / step.x0_weight
        x0, eps = to_x0_and_eps("x0", x0, x_t, step.alpha, step.sigma)
    else:
        x0, eps = to_x0_and_eps(prediction, predicted, x_t, step.alpha, step.sigma)
    if restrict is not None:
        x0, eps = to_x0_and_eps("x0", restrict(x0), x_t, step.alpha, step.sigma)
    return Denoised(
        x0,
        eps,
        log_variance=None if raw is None else log_variance(raw, variance, step),
        mean=predicted if prediction == "previous_x" else None,
    )


def clamp(x0: Tensor) -> Tensor:
    """Clamp x0 to [-1, 1], the range of pixels."""
    return x0.clamp(-1, 1)
