"""Distributions from which training draws timesteps: uniform, or more often where the loss is large (Nichol & Dhariwal
2021, eq. 18)."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Losses, Network, Objective
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.process.base import NoiseProcess
from image_diffusion.process.discrete import DiscreteProcess


class AtTimes(Objective):
    """Objective on a process, at times drawn by the process or given by the caller. config: with
    `label_drop_probability` and `drop_probabilities`."""

    def __init__(self, config: Any, process: NoiseProcess, spec: DataSpec) -> None:
        self._process = process
        self._drop_labels = LabelDropout(config.label_drop_probability, spec, config.drop_probabilities)

    def __call__(self, network: Any, batch: Batch) -> Losses:
        """Draw a time for each sample, and return the losses at these times (`at_times`)."""
        return self.at_times(network, batch, self._process.draw(batch.streams))

    def uniform(self) -> Self:
        same = copy(self)
        same._process = self._process.uniform()
        return same

    @abstractmethod
    def at_times(self, network: Network, batch: Batch, t: Tensor) -> Losses:
        """Draw noise for each sample, drop labels, and return the losses at times t [B]. Raises ValueError if the
        network's channels do not fit."""


class NoisedOnce(AtTimes):
    """Objective whose losses follow from x, its noise and the condition."""

    def at_times(self, network: Network, batch: Batch, t: Tensor) -> Losses:
        noise = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        return self.losses_at(network, batch.x, t, noise, self._drop_labels(batch, network))

    @abstractmethod
    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        """Return the losses of x [B, C, …] at times t [B] with noise like x. Draws no random numbers."""


class UniformTimesteps(Config):
    """Timesteps from the distribution of the process."""

    type: Literal["uniform"] = "uniform"

    def wrap(self, objective: AtTimes, process: NoiseProcess) -> Objective:
        """Return the objective unchanged."""
        return objective


class LossSecondMoment(Config):
    """Timesteps with probabilities proportional to the root mean square of their last losses; uniform until all
    timesteps have a full history."""

    type: Literal["loss_second_moment"] = "loss_second_moment"
    history: int = Field(10, gt=0)
    """Number of last losses of each timestep to use."""
    uniform_probability: float = Field(0.001, gt=0, le=1)
    """Share of timesteps to draw uniformly."""

    def wrap(self, objective: AtTimes, process: NoiseProcess) -> ImportanceSampled:
        """Return the objective with this sampling. Raises ValueError for a process without timesteps."""
        if not isinstance(process, DiscreteProcess):
            raise ValueError(
                "Timestep sampling loss_second_moment needs a discrete process. Use uniform with this one."
            )
        history = LossHistory(process.num_timesteps, self.history, self.uniform_probability)
        return ImportanceSampled(objective, history)


TimestepSampling = Annotated[UniformTimesteps | LossSecondMoment, Field(discriminator="type")]


class ImportanceSampled(Objective):
    """Objective at timesteps sampled by a history of its losses, with importance weights that keep the expectation of
    the loss. The history is updated once per step, so the sampling does not depend on the number of processes and
    microbatches.
    """

    memory: LossHistory

    def __init__(self, objective: AtTimes, history: LossHistory) -> None:
        self._objective, self.memory = objective, history

    def __call__(self, network: Network, batch: Batch) -> Losses:
        """Return the losses and their parts, each times 1 / (T p_t)."""
        t = self.memory.draw(batch.streams)
        weight = self.memory.importance_weights(t)
        losses = self._objective.at_times(network, batch, t)
        parts = {name: part * weight for name, part in losses.parts.items()}
        return Losses(losses.loss * weight, parts, losses.time)

    def uniform(self) -> Objective:
        return self._objective


class LossHistory:
    """The last losses of each timestep, and the sampling probabilities that follow from them."""

    def __init__(self, num_timesteps: int, history: int = 10, uniform_probability: float = 0.001) -> None:
        self.num_timesteps, self._length, self._uniform = num_timesteps, history, uniform_probability
        # Row t has the last losses of timestep t, the n-th one in column n % history. The last row is scratch.
        self._losses = torch.zeros(num_timesteps + 1, history, dtype=torch.float64)
        self._counts = torch.zeros(num_timesteps, dtype=torch.int64)

    def probabilities(self) -> Tensor:
        """Return the probability of each timestep. Float64 [num_timesteps]."""
        root = self._losses[:-1].square().mean(1).sqrt()
        share = root / root.sum().clamp(min=torch.finfo(torch.float64).tiny)
        mixed = (1 - self._uniform) * share + self._uniform / self.num_timesteps
        warmed_up = (self._counts >= self._length).all()
        return torch.where(warmed_up, mixed / mixed.sum(), 1 / self.num_timesteps)

    def draw(self, streams: Streams) -> Tensor:
        """Draw a timestep for each sample. Int64 [B]."""
        self._move_to(streams.sample.device)
        cumulative = _cumulative_sum(self.probabilities())
        t = torch.searchsorted(cumulative, streams.uniform("timestep").double(), right=True)
        return t.clamp(max=self.num_timesteps - 1)  # rounding may leave the last cumulative sum below the number drawn

    def importance_weights(self, t: Tensor) -> Tensor:
        """Return 1 / (T p_t) for timesteps [B]: float32 [B]."""
        return (1 / (self.num_timesteps * self.probabilities()[t])).float()

    def observe(self, losses: Losses) -> None:
        """Append the losses of a step for the global batch, divided by the importance weights of
        `ImportanceSampled`."""
        assert losses.time is not None
        t = (losses.time * self.num_timesteps).round().long()
        self.append(t, losses.loss.detach() / self.importance_weights(t))

    def append(self, t: Tensor, loss: Tensor) -> None:
        """Append losses [n] of timesteps [n] in order, without reading any value on the host."""
        self._move_to(t.device)
        same = t[:, None] == t[None, :]
        earlier, later = same.tril(-1).sum(1), same.triu(1).sum(1)
        # A timestep may occur more often than the history is long: its oldest losses go to the scratch row, because
        # assignments to one element have no defined order.
        row = torch.where(later < self._length, t, self.num_timesteps)
        self._losses[row, (self._counts[t] + earlier) % self._length] = loss.double()
        self._counts.scatter_add_(0, t, torch.ones_like(t))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs: "losses" [T, history] and "counts" [T]."""
        return {"losses": self._losses[:-1].clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned. Raises ValueError where names or shapes differ."""
        expected = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        if shapes != expected:
            raise ValueError(
                f"The checkpoint's timestep history has {shapes}, but this objective keeps {expected}. "
                "Resume with the objective the checkpoint was written with."
            )
        self._losses[:-1] = state["losses"].to(self._losses)
        self._counts = state["counts"].to(self._counts, copy=True)

    def _move_to(self, device: torch.device) -> None:
        if self._counts.device != device:
            self._losses, self._counts = self._losses.to(device), self._counts.to(device)


def _cumulative_sum(values: Tensor) -> Tensor:
    """Return the cumulative sum of [n] in log2(n) additions of fixed order, which torch.cumsum does not have on a
    GPU."""
    shift = 1
    while shift < len(values):
        values = values + torch.cat([values.new_zeros(shift), values[:-shift]])
        shift *= 2
    return values
