"""The loss on held-out samples, always with the same noise and timesteps; and what it decides: the best weights, and an
early end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.data.shards.reader import Shards
from image_diffusion.training.checkpoint.checkpoint import StateDict
from image_diffusion.training.monitor.meter import sums_of
from image_diffusion.training.parallel.flat_parameters import Flat, Vector
from image_diffusion.training.parallel.world import World

_EPOCH = 2**31 - 1  # no pass over the training data has this number


def validation_sums(
    data: Shards, num_samples: int, chunk: int, world: World, losses_of: Callable[[Examples, int], Losses]
) -> dict[str, Tensor]:
    """Return the sums of the losses over the first samples of a split: [chunks, 2, 5] by name, one result of `sums_of`
    for each chunk, zero for the chunks of other processes.

    Chunks have a fixed size and are assigned round-robin, so that no result depends on the number of processes.
    """
    total = min(num_samples, data.num_samples)
    starts = list(range(0, total, chunk))
    sums: dict[str, Tensor] = {}
    for i in starts[world.rank :: world.size] or starts[:1]:
        samples = np.arange(i, min(i + chunk, total))
        sample = torch.from_numpy(samples).to(world.device)
        label = torch.from_numpy(data.labels[samples]).to(world.device)
        stored = data.gather(samples).to(world.device)
        joined_sets = tuple(tensor.to(world.device) for tensor in data.gather_joined(samples))
        examples = Examples(stored, label, torch.full_like(sample, _EPOCH), sample, joined_sets)
        for key, value in sums_of(losses_of(examples, i)).items():
            rows = sums.setdefault(key, value.new_zeros(len(starts), *value.shape))
            rows[i // chunk] = value if (i // chunk) % world.size == world.rank else 0.0
    return sums


class BestWeights:
    """The average at the validation with the smallest loss so far, and the network's buffers at that step.

    step: step of that validation; 0 before the first. buffers: copies the buffers learned without gradients, by name.
    wanted: False if the best weights are not stored.
    """

    def __init__(self, flat: Flat, buffers: Callable[[], dict[str, Tensor]], wanted: bool) -> None:
        self._flat, self._copy_buffers, self.wanted = flat, buffers, wanted
        self.loss, self.step = math.inf, 0
        self.values, self.buffers = flat.values, dict[str, Tensor]()

    def offer(self, loss: float, step: int, values: Tensor) -> None:
        """Store the average of a validation, the same in every process, if its loss is the smallest so far."""
        if not self.step or loss < self.loss:
            self.loss, self.step, self.values, self.buffers = loss, step, values.clone(), self._copy_buffers()

    def tensors(self) -> StateDict:
        """Return the tensors to load a checkpoint into, after `load_state_dict`."""
        return {"": Vector(self._flat, self.values), **self.buffers}

    def state_dict(self) -> dict[str, Any]:
        """Return loss and step, empty before the first validation."""
        return {"loss": self.loss, "step": self.step} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set loss and step, and allocate the tensors of their weights."""
        self.offer(state["loss"], state["step"], self._flat.values)


class Patience:
    """Early stopping: the smallest validation loss of a run, and the step at which the run ends early.

    steps: steps of the run. share: share of the steps after which a run without improvement ends; None: never. loss,
    step: smallest loss and its step; step 0 before any validation. ended_at: step of the early end; None before it.
    """

    def __init__(self, steps: int, share: float | None) -> None:
        self._steps, self.share = steps, share
        self.loss, self.step = math.inf, 0
        self.ended_at: int | None = None

    def observe(self, step: int, loss: float) -> None:
        """Record the loss of a validation, which is the same in every process."""
        if self.share is None:
            return
        if not self.step or loss < self.loss:
            self.loss, self.step = loss, step
        elif (step - self.step) / self._steps >= self.share:  # 7 / 100 is 0.07, but 0.07 * 100 is more than 7
            self.ended_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; empty before the first validation, and without early stopping."""
        return {"loss": self.loss, "step": self.step, "ended_at": self.ended_at} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.loss, self.step, self.ended_at = state["loss"], state["step"], state["ended_at"]
