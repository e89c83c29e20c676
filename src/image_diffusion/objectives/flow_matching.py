"""Flow matching: learn the velocity eps - x0 of the straight path (Lipman et al. 2023; Liu et al. 2023; SiT).

The network may say it in other words, and its error may be measured in others again: x0 for the first and the velocity
for the second is what Li and He 2025, "Back to basics: let denoising generative models denoise" (JiT), found to
work where patches have more numbers than the network has channels.
"""

from __future__ import annotations

from copy import copy
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Network
from image_diffusion.objectives.labels import LabelDropout
from image_diffusion.process.flow import FlowProcess
from image_diffusion.process.noise_process import NoiseProcess, broadcast
from image_diffusion.process.parameterization import Variance, split_output, target

Said = Literal["velocity", "x0", "eps", "v"]


class FlowMatching(Config):
    """Predict the velocity, or what it follows from."""

    type: Literal["flow_matching"] = "flow_matching"
    prediction: Said = "velocity"
    """What the network predicts. From eps nothing follows at the first time, where there is only noise: sample such a
    network with clip_denoised."""
    loss: Said = "velocity"
    """What the squared error is measured in: that of the prediction, converted at the same x_t."""
    min_time: float = Field(0.05, gt=0, le=0.5)
    """Where the conversion divides by the time (of x0) or by one minus the time (of eps), training divides by at least
    this. Sampling is not bounded: its last step ends where the network says that x0 is."""
    contrastive: float = Field(0.0, ge=0, lt=1)
    """Weight of a term that is subtracted: the squared error from what another sample's loss is measured against
    (Stoica et al. 2025, "Contrastive flow matching"). Samples are paired in the order of the global batch, so every
    process and microbatch needs an even number of them."""
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """How often a label is replaced by the null label, for classifier-free guidance."""

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
    """A batch -> one loss per sample: the squared error of what `loss` names, and the contrastive term.

    The sum of its parts "mse" and, where it has a weight, "contrastive". Validation does without that term.
    """

    def __init__(self, config: FlowMatching, process: FlowProcess, spec: DataSpec) -> None:
        self._config, self._process = config, process
        self._drop_labels = LabelDropout(config.label_drop_probability, spec)

    def __call__(self, network: Network, batch: Batch) -> Losses:
        """Draw a time and noise for each sample. Raises ValueError where the network's channels do not fit."""
        t = self._process.draw(batch.streams)
        noise = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        return self.losses_at(network, batch.x, t, noise, self._drop_labels(batch, network))

    def uniform(self) -> FlowMatchingObjective:
        """The squared error alone, at times drawn uniformly."""
        same = copy(self)
        same._process = self._process.uniform()
        same._config = self._config.model_copy(update={"contrastive": 0.0})
        return same

    @property
    def pairs_samples(self) -> bool:
        """Whether the loss of a sample depends on its neighbour in the batch (`paired`)."""
        return self._config.contrastive > 0

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        """The losses of x [B, C, …] at times t [B] with noise like x: nothing is drawn."""
        alpha, sigma = broadcast(self._process.levels(t), x)
        output = network(alpha * x + sigma * noise, self._process.network_time(t), **cond).to(x.dtype)
        predicted, _ = split_output(output, x.shape[1], self._config.variance)
        said, wanted = self._config.prediction, self._config.loss
        error = target(said, x, noise, alpha, sigma) - predicted
        mse = error.square().flatten(1).mean(1)
        if said != wanted:
            factor = conversion(said, wanted, *self._process.levels(t), self._config.min_time)
            mse, error = mse * factor.square().to(mse.dtype), error * broadcast((factor, factor), x)[0]
        parts = {"mse": mse}
        if self._config.contrastive:
            goal = target(wanted, x, noise, alpha, sigma)
            away = (paired(goal) - (goal - error)).square().flatten(1).mean(1)
            parts["contrastive"] = -self._config.contrastive * away
        loss = torch.stack(list(parts.values())).sum(0) if len(parts) > 1 else mse
        return Losses(loss, {name: part.detach() for name, part in parts.items()}, self._process.fraction(t))


def paired(rows: Tensor) -> Tensor:
    """Of rows [B, …] each one's neighbour: 1, 0, 3, 2, …. The last of an odd number has none, and is given itself.

    The paper draws from the whole batch. These pairs are the same in any share of a global batch that does not part
    them, so that the number of processes and microbatches changes nothing; the order of the data is new in each epoch.
    """
    index = torch.arange(len(rows), device=rows.device) ^ 1
    return rows[index.clamp(max=len(rows) - 1)]


def conversion(said: Said, wanted: Said, alpha: Tensor, sigma: Tensor, smallest: float) -> Tensor:
    """The error in what is wanted that an error of 1 in what is said makes, at alpha and sigma [B]. [B].

    At a given x_t = alpha x0 + sigma eps, errors in x0, eps, velocity and v are as -sigma, alpha, alpha + sigma and
    alpha^2 + sigma^2; the size of what is divided by is at least `smallest`.
    """
    sign = -1 if (said == "x0") != (wanted == "x0") else 1

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

    return sign * size(wanted) / size(said).clamp(min=smallest)
