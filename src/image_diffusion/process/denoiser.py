"""Predictions of a network: the parameterizations of its output, and the denoisers by which a sampler calls it.

eps, x0, v, velocity and previous_x are equivalent; a variance may be learned. A denoiser predicts the clean sample for
x_t at a point of the grid. A self-conditioned network receives in each call the estimate of the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from image_diffusion.core.types import Network
from image_diffusion.process.base import Denoised, Grid, NoiseProcess, Steps

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


class NetworkDenoiser:
    """Call a network at the points of a grid and convert its output. grid: of the process. prediction, variance: what
    the network predicts. cond: its conditions, by name. restrict: function applied to each predicted x0
    (`read_output`).
    """

    def __init__(
        self,
        network: Network,
        process: NoiseProcess,
        grid: Grid,
        prediction: Prediction,
        variance: Variance = "fixed_small",
        cond: Mapping[str, Tensor] | None = None,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._network, self._process = process.preconditioned(network), process
        self._cond = dict(cond or {})
        self._prediction, self._variance, self._restrict = prediction, variance, restrict
        self._times, self._steps = grid.time.tolist(), grid.steps
        self._intervals = None if grid.interval is None else grid.interval.tolist()

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        """Return the prediction for x_t [B, C, …] at point i. Raises ValueError where its channels do not fit."""
        dtype = torch.promote_types(x_t.dtype, torch.float32)  # half precision cannot tell timestep 999 from 1000
        time = torch.full((len(x_t),), self._times[i], dtype=dtype, device=x_t.device)
        interval = {} if self._intervals is None else {"interval": torch.full_like(time, self._intervals[i])}
        output = self._network(self._process.network_input(x_t), time, **self._cond, **interval)
        return read_output(output, x_t, self._steps.at(i, x_t), self._prediction, self._variance, self._restrict)


class SelfConditionedDenoiser:
    """Call a network at the points of a grid, and carry its estimate of x0 and its latents to the next call.

    A call at the first point of the grid starts without either. With two calls per step, as in Heun's sampler, the
    second call carries to the next step. One denoiser serves one batch of images, one call at a time.

    network: called as network(x, t, **cond, return_latents=True) -> (prediction, latents, norm), where cond may hold
    "self_cond" and "latents". restrict: function applied to an x0 before the network receives it. guide: builds the
    guided network from a plain one; the unconditional half of a guided batch carries its own latents, and the guided
    x0.
    """

    def __init__(
        self,
        network: Any,
        process: NoiseProcess,
        grid: Grid,
        prediction: Prediction,
        cond: Mapping[str, Tensor],
        restrict: Callable[[Tensor], Tensor],
        guide: Callable[[Network], Network],
    ) -> None:
        self._network, self._restrict = network, restrict
        self._carried: dict[str, Tensor] = {}
        self._denoiser = NetworkDenoiser(guide(self._call), process, grid, prediction, cond=cond)

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        """Return the network's prediction for x_t [B, C, …] at point i."""
        if i == 0:
            self._carried = {}
        denoised = self._denoiser(x_t, i)
        self._carried["self_cond"] = self._restrict(denoised.x0)
        return denoised

    def _call(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        output: Tensor
        carried = {name: _rows(tensor, len(x)) for name, tensor in self._carried.items()}
        output, self._carried["latents"], _ = self._network(x, t, **cond, **carried, return_latents=True)
        return output


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows, or all rows repeated: the batch doubles where guidance starts and halves where it ends."""
    return tensor.repeat(-(-count // len(tensor)), *[1] * (tensor.ndim - 1))[:count]
