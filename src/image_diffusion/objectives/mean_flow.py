"""MeanFlow: predict the average velocity u(x_t, r, t) from t down to r, so that one step can replace the whole
trajectory.

Geng et al. 2025, "Mean flows for one-step generative modeling", arXiv:2505.13447: the identity u = v - (t - r) du/dt,
its weights and its guidance, which is part of the training. Improved form: Geng et al. 2025, "Improved mean flows: On
the challenges of fastforward generative models", arXiv:2512.02012. With a teacher it is Eulerian distillation of a flow
into its map: Boffi et al. 2024, "Flow map matching", arXiv:2406.07507; Sabour et al. 2025, "Align your flow",
arXiv:2506.14603, in which consistency distillation is the case r = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, FrozenCopy, Losses, Network, Objective
from image_diffusion.nn.linear import derivative
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import Prediction, Variance
from image_diffusion.process.flow import FlowProcess


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
