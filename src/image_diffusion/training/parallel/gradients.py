"""The gradient of the mean loss over the global batch, in every process.

Each process computes the gradient of its share of the examples, all examples have the same weight, and the gradient is
summed over the processes in flat pieces while the backward pass still runs. The pieces are fixed at the start of
training. (PyTorch's DistributedDataParallel rebuilds its buckets after the first step of every start, so that with
three or more processes a resumed run adds in another order than an uninterrupted one.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.process.errors import log_line
from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.data.shards.order import share
from image_diffusion.training.monitor.meter import LossesOf, Waits
from image_diffusion.training.parallel.flat_parameters import Flat, Work
from image_diffusion.training.parallel.world import World


@dataclass
class _Piece:
    start: int
    stop: int
    num_parameters: int = 0
    missing: int = 0


class SharedGradient:
    """Gradient by contiguous shares of the global batch, one for each process, in microbatches.

    Returns the losses of this process's own share. waits: time that this process waited for the sums.
    """

    def __init__(
        self, flat: Flat, world: World, global_batch: int, microbatch: int | None, scale: Callable[[Tensor], Tensor]
    ) -> None:
        self._flat, self._world, self._scale = flat, world, scale
        self._global_batch, self._microbatch = global_batch, microbatch or global_batch
        alone = world.size == 1 or flat.sums_gradients
        self._pieces = [] if alone else [_Piece(start, stop) for start, stop in flat.pieces]
        self._running: list[Work] = []
        self.waits = Waits(world.device)
        self._armed, self._next = False, 0
        for slot, parameter in zip(flat.slots, flat.parameters.values(), strict=True):
            for piece in self._pieces:
                if piece.start <= slot.start < piece.stop:
                    piece.num_parameters += 1
                    parameter.register_post_accumulate_grad_hook(partial(self._ready, piece))

    def __call__(self, examples: Examples, losses_of: LossesOf) -> Losses:
        """Fill the flat gradient for the examples of this process."""
        self._flat.begin()
        parts = examples.split(self._microbatch)
        losses = []
        for i, part in enumerate(parts):
            losses.append(losses_of(part, self._world.rank + self._world.size * i))
            last = i + 1 == len(parts)
            self._flat.before_pass(last)
            self._armed, self._next = last, 0
            for piece in self._pieces:
                piece.missing = piece.num_parameters
            self._scale(losses[-1].loss.sum() / self._global_batch).backward()
        self._flat.finish()
        self._launch(everything=True)
        with self.waits:
            for work in self._running:
                work.wait()
        self._running.clear()
        return joined(losses)

    def _ready(self, piece: _Piece, _: Tensor) -> None:
        piece.missing -= 1
        if self._armed:
            self._launch(everything=False)

    def _launch(self, everything: bool) -> None:
        """Start the sums of the next pieces that are complete, in their fixed order."""
        while self._next < len(self._pieces) and (everything or self._pieces[self._next].missing <= 0):
            piece = self._pieces[self._next]
            self._running.append(self._flat.begin_sum(piece.start, piece.stop))
            self._next += 1


class OrderedGradient:
    """Gradient that is bit-identical for any number of processes: the global batch is cut into chunks of a fixed size,
    process r computes the chunks r, r + size, …, and the gradients of all chunks are added in the order of the chunks.

    Each process sums one share of the gradient, from the shares that the others send. Every process receives the whole
    global batch and returns the losses of the whole global batch. waits: time that this process waited for the others.
    """

    def __init__(
        self, flat: Flat, world: World, global_batch: int, chunk: int, scale: Callable[[Tensor], Tensor]
    ) -> None:
        num_chunks = -(-global_batch // chunk)
        if world.is_main and num_chunks < world.size:
            log_line(
                f"warning: {world.size} processes share {num_chunks} chunks of {chunk} examples, so that "
                f"{world.size - num_chunks} have nothing to do. Use fewer."
            )
        self._flat, self._world, self._scale = flat, world, scale
        self._global_batch, self._chunk = global_batch, chunk
        self._sum = flat.gradient.new_zeros(-(-flat.size // world.size))
        self.waits = Waits(world.device)

    def __call__(self, examples: Examples, losses_of: LossesOf) -> Losses:
        """Fill the flat gradient for the examples of all processes."""
        chunks = examples.split(self._chunk)
        self._sum.zero_()
        gathered = []
        for first in range(0, len(chunks), self._world.size):
            own = first + self._world.rank
            self._flat.begin()
            if own < len(chunks):
                losses = losses_of(chunks[own], own)
                self._scale(losses.loss.sum() / self._global_batch).backward()
            elif first == 0:
                losses = losses_of(chunks[0], 0)  # only for the names of its parts
            self._flat.finish()
            with self.waits:
                received = self._world.exchange(self._shares())
            for share_of_one in received[: len(chunks) - first]:
                self._sum += share_of_one
            sizes = [len(chunk.sample) for chunk in chunks[first : first + self._world.size]]
            gathered.append(gather_losses(losses, sizes, self._world))
        self._flat.take(self._sum, self._world)
        return joined(gathered)

    def _shares(self) -> Tensor:
        """Return the gradient of this process's chunk in equal shares, one for each process, padded with zeros."""
        missing = self._world.size * len(self._sum) - self._flat.size
        gradient = F.pad(self._flat.local, (0, missing)) if missing else self._flat.local
        return gradient.view(self._world.size, -1)


def joined(losses: list[Losses]) -> Losses:
    """Return the losses of a batch from those of its parts, detached."""
    return Losses(
        loss=torch.cat([part.loss.detach() for part in losses]),
        parts={key: torch.cat([part.parts[key] for part in losses]) for key in losses[0].parts},
        time=None if losses[0].time is None else torch.cat([part.time for part in losses if part.time is not None]),
        seen={key: torch.cat([part.seen[key] for part in losses]) for key in losses[0].seen},
    )


def gather_losses(losses: Losses, sizes: list[int], world: World) -> Losses:
    """Return the losses of all processes, in the order of their ranks. sizes: number of losses of each process; the
    remaining processes have none."""
    if world.size == 1:
        return joined([losses])
    rows = [losses.loss, *losses.parts.values(), *([] if losses.time is None else [losses.time])]
    own = sizes[world.rank] if world.rank < len(sizes) else 0
    packed = torch.stack([row.detach().double()[:own] for row in rows], dim=1)
    every = _rows(packed, sizes, world).T.contiguous()
    columns = [column.to(row.dtype) for column, row in zip(every, rows, strict=True)]
    time = None if losses.time is None else columns.pop()
    seen = {key: _rows(tensor[:own], sizes, world) for key, tensor in losses.seen.items()}
    return Losses(columns[0], dict(zip(losses.parts, columns[1:], strict=True)), time, seen)


def _rows(tensor: Tensor, sizes: list[int], world: World) -> Tensor:
    """Return the rows of all processes, in the order of their ranks. sizes: as of `gather_losses`."""
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return torch.cat([part[:size] for part, size in zip(world.gather(padded), sizes, strict=False)])


def shares(global_batch: int, world: World) -> list[int]:
    """Return the number of examples of a global batch for each process."""
    bounds = [share(0, global_batch, rank, world.size) for rank in range(world.size)]
    return [stop - start for start, stop in bounds]
