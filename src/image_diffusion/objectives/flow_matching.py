"""Flow matching: learn the velocity eps - x0 of the straight path (Lipman et al. 2023; Liu et al. 2023; SiT).

The network may predict another quantity, and the error may be measured in a third: Li and He 2025, "Back to basics: let
denoising generative models denoise" (JiT), found x0 to work if patches have more numbers than the network has channels.

MeanFlow: learn the average velocity u(x_t, r, t) from t down to r, so that one step can replace the whole trajectory.
Geng et al. 2025, "Mean flows for one-step generative modeling", arXiv:2505.13447: the identity u = v - (t - r) du/dt,
its weights and its guidance, which is part of the training. Improved form: Geng et al. 2025, "Improved mean flows: On
the challenges of fastforward generative models", arXiv:2512.02012. With a teacher it is Eulerian distillation of a flow
into its map: Boffi et al. 2024, "Flow map matching", arXiv:2406.07507; Sabour et al. 2025, "Align your flow",
arXiv:2506.14603, in which consistency distillation is the case r = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, FrozenCopy, Losses, Network, Objective
from image_diffusion.nn.linear import derivative
from image_diffusion.objectives.label_dropout import DropsConditionParts, LabelDropout
from image_diffusion.objectives.timestep_sampling import NoisedOnce
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import Prediction, Variance, split_output, target
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


class MeanFlow(Config):
    """Predict the average velocity over an interval of times, on which the network is conditioned."""

    type: Literal["mean_flow"] = "mean_flow"
    interval_probability: float = Field(0.25, gt=0, le=1)
    """Probability of an interval r < t; otherwise r = t, which is flow matching."""
    direction: Literal["sampled", "predicted", "teacher"] = "sampled"
    """Velocity along which the derivative is taken. sampled: that of the sample. predicted: that of the network (the
    improved form, for one more call). teacher: that of the network at the start of training (`train.init_from`), which
    also replaces the sample's velocity as the target: the model is distilled, for one call of the teacher."""
    weight_power: float = Field(1.0, ge=0)
    """Power p of the adaptive weight 1 / (error + 1e-3)^p of the squared error, which limits the gradient of large
    errors; 0: no weight."""
    guidance_scale: float = Field(1.0, ge=1, le=1e6)
    """Scale of the guidance that is built into the learned velocities, for one more call of the network; sampling then
    needs no guidance."""
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for guidance."""

    prediction: ClassVar[Prediction] = "velocity"
    """Quantity that the network predicts; without an interval, the instantaneous velocity."""
    variance: ClassVar[Variance] = "fixed_small"
    """No variance is learned."""
    drop_probabilities: ClassVar[Mapping[str, float]] = {}
    """No part of the condition is dropped alone."""
    learns_intervals: ClassVar[bool] = True
    """True if the network is conditioned on intervals."""

    @model_validator(mode="after")
    def _guides_away_from_something(self) -> MeanFlow:
        if self.guidance_scale != 1 and self.label_drop_probability == 0:
            raise ValueError(
                f"guidance_scale is {self.guidance_scale:g}, but the network never learns to do without a label. Use "
                "1, or set label_drop_probability above 0."
            )
        return self

    def build(self, process: NoiseProcess, spec: DataSpec) -> MeanFlowObjective:
        """Return the objective for data on a process. Raises ValueError unless the process is flow."""
        if not isinstance(process, FlowProcess):
            raise ValueError(
                "Objective mean_flow needs the flow process. Set process.type to flow, or objective.type to denoising."
            )
        return MeanFlowObjective(self, process, spec)


class MeanFlowObjective(Objective):
    """Objective with one loss per sample; its part "mse" is the unweighted error."""

    def __init__(self, config: MeanFlow, process: FlowProcess, spec: DataSpec) -> None:
        self._config, self._process = config, process
        self._drop_labels = LabelDropout(config.label_drop_probability, spec)
        self.teacher = FrozenCopy() if config.direction == "teacher" else None

    def __call__(self, network: Network, batch: Batch) -> Losses:
        """Draw two times and noise for each sample."""
        drawn = torch.stack([self._process.draw(batch.streams, name) for name in ("timestep", "second_timestep")])
        (r, t), interval = drawn.aminmax(dim=0), batch.streams.event("interval", self._config.interval_probability)
        noise, x = batch.streams.normal("noise", tuple(batch.x.shape[1:])), batch.x
        alpha, sigma = broadcast(self._process.levels(t), x)
        x_t, v, cond = alpha * x + sigma * noise, noise - x, self._drop_labels(batch, network)
        time = self._process.network_time(t)
        if self.teacher is not None:
            with torch.no_grad():
                v = self.teacher(x_t, time, **cond).to(x.dtype)
        if self._config.guidance_scale != 1:
            dropped = self._drop_labels.dropped(batch, network)
            v = self._guided(self.teacher or network, batch, x_t, t, v, dropped)
        r = torch.where(interval, r, t)
        predicted = network(x_t, time, **cond, interval=self._process.network_time(t - r))
        target = self._target(network, x_t, r, t, v, cond)
        squares = (predicted.to(x.dtype) - target).square().flatten(1)
        weight = (squares.detach().sum(1) + 1e-3) ** -self._config.weight_power
        return Losses(squares.sum(1) * weight, {"mse": squares.detach().mean(1)}, self._process.fraction(t))

    def uniform(self) -> MeanFlowObjective:
        same = copy(self)
        same._process = self._process.uniform()
        same._config = self._config.model_copy(update={"weight_power": 0.0})
        return same

    @torch.no_grad()
    def _guided(self, network: Network, batch: Batch, x_t: Tensor, t: Tensor, v: Tensor, dropped: Tensor) -> Tensor:
        """Return w v + (1 - w) u(x_t, t, t | no label) [B, C, ...], or v where the label is dropped, bool [B]."""
        w, null = self._config.guidance_scale, self._drop_labels.null(batch.cond)
        without = network(x_t, self._process.network_time(t), **null).to(v.dtype)
        return torch.where(dropped.view(-1, *[1] * (v.ndim - 1)), v, w * v + (1 - w) * without)

    def _target(
        self, network: Network, x_t: Tensor, r: Tensor, t: Tensor, v: Tensor, cond: dict[str, Tensor]
    ) -> Tensor:
        """Return v - (t - r) du/dt [B, C, ...], where d/dt is v d/dx + d/dt at a fixed r."""
        time, interval, along = self._process.network_time(t), self._process.network_time(t - r), v
        if self._config.direction == "predicted":
            with torch.no_grad():
                along = network(x_t, time, **cond).to(v.dtype)

        def u(x: Tensor, time: Tensor, interval: Tensor) -> Tensor:
            return network(x, time, **cond, interval=interval).to(v.dtype)

        rate = self._process.network_time(torch.ones_like(t))
        du_dt = derivative(u, (x_t, time, interval), (along, rate, rate))
        return v - broadcast((t - r, t), v)[0] * du_dt
