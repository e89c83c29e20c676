"""Flow matching: learn the velocity eps - x0 of the straight path (Lipman et al. 2023; Liu et al. 2023; SiT).

The network may predict another quantity, and the error may be measured in a third: Li and He 2025, "Back to basics: let
denoising generative models denoise" (JiT), found x0 to work if patches have more numbers than the network has channels.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.types import DataSpec, Losses, Network
from image_diffusion.objectives.label_dropout import DropsConditionParts
from image_diffusion.objectives.timestep_sampling import NoisedOnce
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import Variance, split_output, target
from image_diffusion.process.flow import FlowProcess

Said = Literal["velocity", "x0", "eps", "v"]


class FlowMatching(DropsConditionParts):
    """Predict the velocity, or a quantity that determines it."""

    type: Literal["flow_matching"] = "flow_matching"
    prediction: Said = "velocity"
    """Quantity that the network predicts. At the first time, where x is only noise, eps does not determine x0: sample
    such a network with clip_denoised."""
    loss: Said = "velocity"
    """Quantity in which the squared error is measured: that of the prediction, converted at the same x_t."""
    min_time: float = Field(0.05, gt=0, le=0.5)
    """Lower bound of the divisor in training: converting x0 divides by the time, and converting eps by one minus the
    time. Sampling needs no bound, because its last step ends at the predicted x0."""
    contrastive: float = Field(0.0, ge=0, lt=1)
    """Weight of a term that is subtracted: the squared error to the target of another sample (Stoica et al. 2025,
    "Contrastive flow matching"). Samples are paired in the order of the global batch, so every process and microbatch
    needs an even number of them."""
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for classifier-free guidance."""

    variance: ClassVar[Variance] = "fixed_small"
    """No variance is learned."""

    def build(self, process: NoiseProcess, spec: DataSpec) -> FlowMatchingObjective:
        """Return the objective for data on a process. Raises ValueError unless the process is flow."""
        if not isinstance(process, FlowProcess):
            raise ValueError(
                "Objective flow_matching needs the flow process. "
                "Set process.type to flow, or objective.type to denoising."
            )
        return FlowMatchingObjective(self, process, spec)


class FlowMatchingObjective(NoisedOnce):
    """Objective with one loss per sample of a batch, the sum of its parts: "mse", the squared error of the quantity
    that `loss` names, and, if it has a weight, "contrastive". Validation omits the contrastive term.
    """

    def __init__(self, config: FlowMatching, process: FlowProcess, spec: DataSpec) -> None:
        super().__init__(config, process, spec)
        self._config = config
        self.pairs_samples = config.contrastive > 0

    def uniform(self) -> Self:
        same = super().uniform()
        same._config = self._config.model_copy(update={"contrastive": 0.0})
        same.pairs_samples = False
        return same

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        alpha, sigma = broadcast(self._process.levels(t), x)
        output = network(alpha * x + sigma * noise, self._process.network_time(t), **cond).to(x.dtype)
        predicted, _ = split_output(output, x.shape[1], self._config.variance)
        prediction, measured = self._config.prediction, self._config.loss
        error = target(prediction, x, noise, alpha, sigma) - predicted
        mse = error.square().flatten(1).mean(1)
        if prediction != measured:
            factor = conversion(prediction, measured, *self._process.levels(t), self._config.min_time)
            mse, error = mse * factor.square().to(mse.dtype), error * broadcast((factor, factor), x)[0]
        parts = {"mse": mse}
        if self._config.contrastive:
            goal = target(measured, x, noise, alpha, sigma)
            away = (paired(goal) - (goal - error)).square().flatten(1).mean(1)
            parts["contrastive"] = -self._config.contrastive * away
        loss = torch.stack(list(parts.values())).sum(0) if len(parts) > 1 else mse
        return Losses(loss, {name: part.detach() for name, part in parts.items()}, self._process.fraction(t))


def paired(rows: Tensor) -> Tensor:
    """Return each row's neighbour in rows [B, …]: 1, 0, 3, 2, …. The last of an odd number is paired with itself.

    The paper draws from the whole batch. These pairs do not depend on the number of processes and microbatches, if none
    splits a pair; the data are reshuffled in each epoch.
    """
    index = torch.arange(len(rows), device=rows.device) ^ 1
    return rows[index.clamp(max=len(rows) - 1)]


def conversion(prediction: Said, measured: Said, alpha: Tensor, sigma: Tensor, smallest: float) -> Tensor:
    """Return the error in the measured quantity that an error of 1 in the predicted one causes, [B], at alpha and sigma
    [B].

    At a given x_t = alpha x0 + sigma eps, errors in x0, eps, velocity and v are as -sigma, alpha, alpha + sigma and
    alpha^2 + sigma^2; the divisor is at least `smallest`.
    """
    sign = -1 if (prediction == "x0") != (measured == "x0") else 1

    def size(name: Said) -> Tensor:
        match name:
            case "x0":
                return sigma
            case "eps":
                return alpha
            case "velocity":
                return alpha + sigma
            case "v":
                return alpha**2 + sigma**2

    return sign * size(measured) / size(prediction).clamp(min=smallest)
