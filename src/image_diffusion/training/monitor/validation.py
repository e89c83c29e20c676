"""The loss on held-out samples, always with the same noise and timesteps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.data.shards.reader import Shards
from image_diffusion.training.monitor.meter import sums_of
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
