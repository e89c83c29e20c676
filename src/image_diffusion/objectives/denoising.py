"""Denoising: predict the noise in x_t (Ho et al. 2020), and the variance of the step (Nichol & Dhariwal 2021).

Differences from the published code of these papers: weights multiply the loss of their own sample, and every prediction
can be combined with every variance.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.types import DataSpec, Losses, Network, Objective
from image_diffusion.objectives.label_dropout import DropsConditionParts
from image_diffusion.objectives.timestep_sampling import NoisedOnce, TimestepSampling, UniformTimesteps
from image_diffusion.objectives.weighting import UniformWeighting, Weighting
from image_diffusion.process.base import NoiseProcess, Steps, broadcast
from image_diffusion.process.denoiser import (
    LEARNED_VARIANCES,
    Variance,
    log_variance,
    read_output,
    split_output,
    target,
)
from image_diffusion.process.discrete import DiscreteProcess
from image_diffusion.process.edm import EdmProcess
from image_diffusion.process.likelihood import variational_bound

Loss = Literal["simple", "hybrid", "rescaled_hybrid", "kl", "rescaled_kl"]


class Denoising(DropsConditionParts):
    """Predict eps, x0, v or previous_x."""

    type: Literal["denoising"] = "denoising"
    prediction: Literal["eps", "x0", "v", "previous_x"] = "eps"
    """Quantity that the network predicts."""
    variance: Variance = "fixed_large"
    """Variance of the reverse process. To learn it, the network has twice the output channels."""
    loss: Loss = "simple"
    """simple: squared error. hybrid: squared error, and the variational bound for the learned variance alone;
    rescaled_hybrid: the bound times num_timesteps / 1000. kl: the bound; rescaled_kl: times num_timesteps."""
    weighting: Weighting = UniformWeighting()
    """Weight of the squared error at each noise level."""
    timestep_sampling: TimestepSampling = UniformTimesteps()
    """Distribution from which timesteps are drawn."""
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for classifier-free guidance."""

    @model_validator(mode="after")
    def _consistent(self) -> Denoising:
        learned, hybrid = self.variance in LEARNED_VARIANCES, self.loss in ("hybrid", "rescaled_hybrid")
        if hybrid and not learned:
            raise ValueError(
                f"Loss {self.loss} teaches a variance, but variance is {self.variance}. "
                "Set variance to learned_range, or loss to simple."
            )
        if self.loss == "simple" and learned:
            raise ValueError(
                f"Loss simple teaches no variance, but variance is {self.variance}. "
                "Set loss to hybrid, or variance to fixed_large."
            )
        if self.weighting.type != "uniform" and (self.prediction == "previous_x" or self.loss in ("kl", "rescaled_kl")):
            raise ValueError(
                f"Weighting {self.weighting.type} is of a squared error in eps, x0 or v; got prediction "
                f"{self.prediction} with loss {self.loss}. Set weighting to uniform."
            )
        return self

    def build(self, process: NoiseProcess, spec: DataSpec) -> Objective:
        """Return the objective for data on a process. Raises ValueError if they cannot be combined."""
        return self.timestep_sampling.wrap(DenoisingObjective(self, process, spec), process)


class DenoisingObjective(NoisedOnce):
    """Objective that returns one loss per sample of a batch, the sum of its parts "mse" and "vb" (in bits), if
    present."""

    def __init__(self, config: Denoising, process: NoiseProcess, spec: DataSpec) -> None:
        if isinstance(process, EdmProcess):
            raise ValueError(
                "The edm process preconditions its network, which objective denoising does not support. Use objective "
                "edm."
            )
        needs_steps = config.loss != "simple" or config.prediction == "previous_x"
        if needs_steps and not isinstance(process, DiscreteProcess):
            raise ValueError(
                f"Loss {config.loss} with prediction {config.prediction} needs a discrete process. "
                "Use loss simple and prediction eps, x0 or v with this one."
            )
        super().__init__(config, process, spec)
        self._config = config

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        levels = self._process.levels(t)
        alpha, sigma = broadcast(levels, x)
        x_t = alpha * x + sigma * noise
        output = network(self._process.network_input(x_t), self._process.network_time(t), **cond).to(x.dtype)
        predicted, raw = split_output(output, x.shape[1], self._config.variance)

        parts = {}
        if self._config.loss not in ("kl", "rescaled_kl"):
            weight = self._config.weighting.weight(self._config.prediction, *levels).to(x.dtype)
            error = self._target(x, noise, x_t, t) - predicted
            parts["mse"] = error.square().flatten(1).mean(1) * weight
            if raw is not None:
                output = torch.cat([predicted.detach(), raw], 1)  # the bound trains only the variance
        if self._config.loss != "simple":
            parts["vb"] = self._bound_weight() * self._bound(output, raw, x, x_t, t)
        loss = torch.stack(list(parts.values())).sum(0)
        return Losses(loss, {name: part.detach() for name, part in parts.items()}, self._process.fraction(t))

    def _target(self, x: Tensor, noise: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        if self._config.prediction == "previous_x":
            return self._step(t, x).posterior_mean(x, x_t)
        return target(self._config.prediction, x, noise, *broadcast(self._process.levels(t), x))

    def _bound(self, output: Tensor, raw: Tensor | None, x: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the term of the variational bound at each sample's timestep, in bits per dimension: [B]."""
        step = self._step(t, x)
        denoised = read_output(output, x_t, step, self._config.prediction, self._config.variance)
        mean, log_var = step.reverse_mean(denoised, x_t), log_variance(raw, self._config.variance, step)
        return variational_bound(x, x_t, step, mean, log_var, ends_clean=t == 0)

    def _bound_weight(self) -> float:
        assert isinstance(self._process, DiscreteProcess)
        num_timesteps = self._process.num_timesteps
        # T turns the mean over timesteps into their sum, the bound; the hybrid divides by 1,000, so that mse dominates
        return {"rescaled_hybrid": num_timesteps / 1000, "rescaled_kl": num_timesteps}.get(self._config.loss, 1.0)

    def _step(self, t: Tensor, x: Tensor) -> Steps:
        assert isinstance(self._process, DiscreteProcess)
        return self._process.steps_on(x.device).at(t, x)
