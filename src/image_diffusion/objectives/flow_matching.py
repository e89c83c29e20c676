"""Flow matching: predict the velocity eps - x0 of the straight path (Lipman et al. 2023; Liu et al. 2023; SiT)."""

from __future__ import annotations

from copy import copy
from typing import Literal

from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Network
from image_diffusion.objectives.labels import LabelDropout
from image_diffusion.process.flow import FlowProcess
from image_diffusion.process.noise_process import NoiseProcess, broadcast
from image_diffusion.process.parameterization import Prediction, Variance, split_output, target


class FlowMatching(Config):
    """Predict the velocity."""

    type: Literal["flow_matching"] = "flow_matching"
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """How often a label is replaced by the null label, for classifier-free guidance."""

    @property
    def prediction(self) -> Prediction:
        """What the network predicts: the velocity."""
        return "velocity"

    @property
    def variance(self) -> Variance:
        """No variance is learned."""
        return "fixed_small"

    @property
    def learns_intervals(self) -> bool:
        """Whether the network is told of intervals: it is not."""
        return False

    def build(self, process: NoiseProcess, spec: DataSpec) -> FlowMatchingObjective:
        """The objective for data on a process. Raises ValueError unless the process is flow."""
        if not isinstance(process, FlowProcess):
            raise ValueError(
                "Objective flow_matching needs the flow process. "
                "Set process.type to flow, or objective.type to denoising."
            )
        return FlowMatchingObjective(self, process, spec)


class FlowMatchingObjective:
    """A batch -> one loss per sample: the squared error of the velocity."""

    def __init__(self, config: FlowMatching, process: FlowProcess, spec: DataSpec) -> None:
        self._config, self._process = config, process
        self._drop_labels = LabelDropout(config.label_drop_probability, spec)

    def __call__(self, network: Network, batch: Batch) -> Losses:
        """Draw a time and noise for each sample. Raises ValueError where the network's channels do not fit."""
        t = self._process.draw(batch.streams)
        noise = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        return self.losses_at(network, batch.x, t, noise, self._drop_labels(batch, network))

    def uniform(self) -> FlowMatchingObjective:
        """The same at times drawn uniformly."""
        same = copy(self)
        same._process = self._process.uniform()
        return same

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        """The losses of x [B, C, …] at times t [B] with noise like x: nothing is drawn."""
        alpha, sigma = broadcast(self._process.levels(t), x)
        output = network(alpha * x + sigma * noise, self._process.network_time(t), **cond).to(x.dtype)
        velocity, _ = split_output(output, x.shape[1], self._config.variance)
        mse = (target("velocity", x, noise, alpha, sigma) - velocity).square().flatten(1).mean(1)
        return Losses(mse, {"mse": mse.detach()}, self._process.fraction(t))
