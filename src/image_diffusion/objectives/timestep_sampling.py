"""How training draws timesteps: uniformly, or more often where the loss is large (Nichol & Dhariwal 2021, eq. 18)."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.process.discrete import DiscreteProcess
from image_diffusion.process.noise_process import NoiseProcess


class TimestepSampler(Protocol):
    """Draws times and may learn from the losses. Only `end_step` changes what it draws."""

    def draw(self, streams: Streams) -> tuple[Tensor, Tensor | None]:
        """Times [B], and what to multiply each loss by to keep its expectation [B]; None: 1."""
        ...

    def record(self, t: Tensor, loss: Tensor) -> None:
        """Note the losses [B] of times [B], on this process."""
        ...

    def end_step(self) -> None:
        """Take in what was recorded since the last step, on every process. All processes call it together."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs, between steps."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The opposite of `state_dict`. Raises ValueError where names or shapes differ."""
        ...


class UniformTimesteps(Config):
    """Times as the process draws them."""

    type: Literal["uniform"] = "uniform"

    def build(self, process: NoiseProcess) -> TimestepSampler:
        """The sampler."""
        return UniformSampler(process)


class LossSecondMoment(Config):
    """Timesteps in proportion to the root mean square of their last losses; uniform until all have enough of them."""

    type: Literal["loss_second_moment"] = "loss_second_moment"
    history: int = Field(10, gt=0)
    """How many losses of each timestep are remembered."""
    uniform_probability: float = Field(0.001, gt=0, le=1)
    """Share of timesteps drawn uniformly all the same."""

    def build(self, process: NoiseProcess) -> TimestepSampler:
        """The sampler. Raises ValueError for a process without timesteps."""
        if not isinstance(process, DiscreteProcess):
            raise ValueError(
                "Timestep sampling loss_second_moment needs a discrete process. Use uniform with this one."
            )
        return LossSecondMomentSampler(process.num_timesteps, self.history, self.uniform_probability)


TimestepSampling = Annotated[UniformTimesteps | LossSecondMoment, Field(discriminator="type")]


class UniformSampler:
    """Times as the process draws them; learns nothing."""

    def __init__(self, process: NoiseProcess) -> None:
        self._process = process

    def draw(self, streams: Streams) -> tuple[Tensor, Tensor | None]:
        """See `TimestepSampler`."""
        return self._process.draw(streams), None

    def record(self, t: Tensor, loss: Tensor) -> None:
        """See `TimestepSampler`."""

    def end_step(self) -> None:
        """See `TimestepSampler`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""
        if state:
            raise ValueError(f"Uniform timestep sampling has no state, but the checkpoint has {', '.join(state)}.")


class LossSecondMomentSampler:
    """Importance sampling of timesteps.

    Losses count from the next step on, in the order of the processes and of the samples within each: when each takes
    its contiguous share of the batch, neither the number of processes nor of micro-batches changes what is drawn.
    """

    def __init__(self, num_timesteps: int, history: int = 10, uniform_probability: float = 0.001) -> None:
        self._num_timesteps, self._length, self._uniform = num_timesteps, history, uniform_probability
        # Row t holds the last losses of timestep t, the n-th one in column n % history. The last row is scratch.
        self._losses = torch.zeros(num_timesteps + 1, history, dtype=torch.float64)
        self._counts = torch.zeros(num_timesteps, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._capacity: int | None = None

    def probabilities(self) -> Tensor:
        """Of each timestep. Float64 [num_timesteps]."""
        root = self._losses[:-1].square().mean(1).sqrt()
        share = root / root.sum().clamp(min=torch.finfo(torch.float64).tiny)
        mixed = (1 - self._uniform) * share + self._uniform / self._num_timesteps
        warmed_up = (self._counts >= self._length).all()
        return torch.where(warmed_up, mixed / mixed.sum(), 1 / self._num_timesteps)

    def draw(self, streams: Streams) -> tuple[Tensor, Tensor | None]:
        """See `TimestepSampler`. Float32 weights."""
        self._move_to(streams.sample.device)
        cumulative = _cumulative_sum(self.probabilities())
        t = torch.searchsorted(cumulative, streams.uniform("timestep").double(), right=True)
        t = t.clamp(max=self._num_timesteps - 1)
        return t, self.importance_weights(t)

    def importance_weights(self, t: Tensor) -> Tensor:
        """1 / (T p_t) for timesteps [B]: float32 [B]."""
        return (1 / (self._num_timesteps * self.probabilities()[t])).float()

    def record(self, t: Tensor, loss: Tensor) -> None:
        """See `TimestepSampler`. Losses that nothing learns from, as in validation, do not count."""
        if loss.requires_grad:
            self._pending.append((t, loss.detach().double()))

    def end_step(self) -> None:
        """See `TimestepSampler`."""
        device = self._counts.device
        t = torch.cat([t.to(device) for t, _ in self._pending] or [self._counts[:0]])
        loss = torch.cat([loss.to(device) for _, loss in self._pending] or [self._losses[0, :0]])
        self._pending = []
        if dist.is_available() and dist.is_initialized():
            t, loss, valid = self._gather(t, loss)
        else:
            valid = torch.ones_like(t, dtype=torch.bool)
        self._append(t, loss, valid)

    def state_dict(self) -> dict[str, Tensor]:
        """ "losses" [T, history] and "counts" [T]."""
        return {"losses": self._losses[:-1].clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `TimestepSampler`."""
        expected = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in state.items()}
        if found != expected:
            raise ValueError(
                f"The checkpoint's timestep history has {found}, but this objective keeps {expected}. "
                "Resume with the objective the checkpoint was written with."
            )
        self._losses[:-1] = state["losses"].to(self._losses)
        self._counts = state["counts"].to(self._counts)

    def _append(self, t: Tensor, loss: Tensor, valid: Tensor) -> None:
        """Append losses [n] of timesteps [n] in order, without reading any value on the host."""
        same = (t[:, None] == t[None, :]) & valid[None, :]
        earlier, later = same.tril(-1).sum(1), same.triu(1).sum(1)
        kept = valid & (later < self._length)
        column = (self._counts[t] + earlier) % self._length
        self._losses[torch.where(kept, t, self._num_timesteps), column] = loss
        self._counts.scatter_add_(0, t, valid.long())

    def _gather(self, t: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Timesteps and losses of all processes in order, padded, and which of them are not padding."""
        if self._capacity is None:  # the one value read on the host, once: the largest share of any process
            largest = torch.tensor(len(t), device=t.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self._capacity = int(largest)
        assert len(t) <= self._capacity, f"{len(t)} losses in a step, after {self._capacity} in the first one"
        message = loss.new_zeros(self._capacity + 1, 2)
        message[0, 0] = len(t)
        message[1 : len(t) + 1] = torch.stack([t.double(), loss], 1)
        messages = loss.new_empty(dist.get_world_size() * (self._capacity + 1), 2)
        dist.all_gather_into_tensor(messages, message)
        messages = messages.view(-1, self._capacity + 1, 2)
        valid = torch.arange(self._capacity, device=t.device) < messages[:, :1, 0]
        rows = messages[:, 1:].flatten(0, 1)
        return rows[:, 0].long(), rows[:, 1], valid.flatten()

    def _move_to(self, device: torch.device) -> None:
        if self._counts.device != device:
            self._losses, self._counts = self._losses.to(device), self._counts.to(device)


def _cumulative_sum(values: Tensor) -> Tensor:
    """Of [n], in log2(n) additions whose order is fixed; on a GPU that of torch.cumsum is not."""
    shift = 1
    while shift < len(values):
        values = values + torch.cat([values.new_zeros(shift), values[:-shift]])
        shift *= 2
    return values
