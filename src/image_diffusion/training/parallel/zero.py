"""Sharded optimizer state: every process has the whole network, and updates a slice of its weights (ZeRO stage 1,
Rajbhandari et al. 2020, arXiv:1910.02054).

The gradient is cut into pieces, and each process receives an equal part of the sum of each piece. The concatenated
parts are its slice. A process stores only its slice of float32 weights, gradient, moments and averages, and updates
only that. All processes then gather the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from image_diffusion.nn.blocks import factors, inner_matrices
from image_diffusion.training.parallel.flat_parameters import ALIGN, Flat, Layout, Slot, Sum, Work, cut, trainable
from image_diffusion.training.parallel.world import World


@dataclass(frozen=True)
class _Piece:
    """Elements start … stop of the layout, of which each process has an equal part. weights: the network's weights in
    this piece, float32 or rounded."""

    start: int
    stop: int
    weights: Tensor


class SlicedFlat(Flat):
    """A network's parameters, and one process's slice of the vectors in their layout.

    values, gradient: float32 [size / world size], this process's slice. exact: sums, including the norm, are
    bit-identical to those of one process; slower. computes_in: dtype to which autocast rounds the factors of products.
    The network has the weights of linear and convolutional layers only in this dtype, in which they are gathered.
    Results equal autocast's; gradients of one backward pass are added up in float32.
    """

    is_whole = False

    def __init__(
        self,
        network: nn.Module,
        world: World,
        exact: bool = False,
        computes_in: torch.dtype = torch.float32,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        self.parameters, self.inner, self._reduce = trainable(network), inner_matrices(network), reduce
        self._world, n = world, world.size
        Layout.__init__(self, self.parameters, ALIGN if exact else ALIGN * n)
        # Exact sums run over the unpadded length, so that their order does not depend on the number of processes.
        self._end = self.size if exact else None
        self.size = -(-self.size // (ALIGN * n)) * ALIGN * n
        if self.matrices_end == self._end:
            self.matrices_end = self.size
        rounded = set() if exact or computes_in == torch.float32 else factors(network)
        self.pieces = [(0, self.size)] if exact else cut(self, rounded)
        self.local = torch.zeros(self.size, device=world.device)
        self.values, self.gradient = (self.local.new_zeros(self.size // n) for _ in range(2))
        name_at = {slot.start: slot.name for slot in self.slots}
        self._pieces: list[_Piece] = []
        for start, stop in sorted(self.pieces):
            kind = computes_in if name_at[start] in rounded else torch.float32
            self._pieces.append(_Piece(start, stop, self.local.new_zeros(stop - start, dtype=kind)))
        self._shown = [slot.within(self._at(slot.start).weights, self._at(slot.start).start) for slot in self.slots]
        whole = torch.zeros_like(self.local)
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            slot.within(whole).copy_(parameter.data)
            parameter.register_post_accumulate_grad_hook(partial(self._add, slot))
        self._keep(self.values, whole)
        for piece in self._pieces:
            piece.weights.copy_(whole[piece.start : piece.stop])
        self._set_views(self._shown)
        self._untouched: set[str] = set()

    def begin(self) -> None:
        self._untouched = {slot.name for slot in self.slots}

    def _add(self, slot: Slot, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if slot.name in self._untouched:
            slot.within(self.local).copy_(parameter.grad)
            self._untouched.remove(slot.name)
        else:
            slot.within(self.local).add_(parameter.grad)
        # Freed at once: the network never holds more than one parameter's gradient beside `local`.
        parameter.grad = None

    def finish(self) -> None:
        """Finish the backward passes of a step: set gradients that no pass reached to zero."""
        for slot in self.slots:
            if slot.name in self._untouched:
                slot.within(self.local).zero_()

    def begin_sum(self, start: int, stop: int) -> Work:
        """Begin to add up a piece of `local` over all processes. Each process receives its part."""
        part = self._part(self.gradient, self._at(start))
        made = part if part.dtype == self._reduce else torch.empty_like(part, dtype=self._reduce)
        rounded = self.local[start:stop].to(self._reduce)
        return Sum(cast("Work", dist.reduce_scatter_tensor(made, rounded, async_op=True)), made, part)

    def take(self, share: Tensor, world: World) -> None:
        """Set this process's slice of the gradient to its share of a gradient that is a single piece."""
        self.gradient.copy_(share)

    def norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(
            self._world.gather(torch.linalg.vector_norm(self.gradient))
            if self._end is None
            else self._whole(self.gradient)[: self._end]
        )
        return norm

    def update_network(self) -> None:
        """Update the network's weights after a change of `values`. All processes call it together."""
        parts = [self._part(self.values, piece).to(piece.weights.dtype) for piece in self._pieces]
        running = [
            cast("Work", dist.all_gather_into_tensor(piece.weights, part, async_op=True))
            for piece, part in zip(self._pieces, parts, strict=True)
        ]
        for work in running:
            work.wait()

    @contextmanager
    def with_weights(self, vector: Tensor) -> Iterator[None]:
        self._set_views(self.views(self._whole(vector)))
        try:
            yield
        finally:
            self._set_views(self._shown)

    def _set_views(self, views: list[Tensor]) -> None:
        for parameter, view in zip(self.parameters.values(), views, strict=True):
            parameter.data = view

    def place(self, start: int) -> int:
        """Return the position in this process's slice of its first element at or after `start` of the layout."""
        if start == self.size:
            return len(self.values)
        piece, n = self._at(start), self._world.size
        length = (piece.stop - piece.start) // n
        before = start - piece.start - self._world.rank * length
        return piece.start // n + min(max(before, 0), length)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return complete tensors by name, on the CPU of the first process; elsewhere none. All processes call it
        together."""
        whole = self._whole(vector)
        return super().named(whole.cpu()) if self._world.is_main else {}

    def fill(self, vector: Tensor, tensors: Mapping[str, Tensor] | None, world: World) -> None:
        """Distribute tensors of the first process: every process receives its slice. tensors: by name."""
        whole = torch.zeros_like(self.local)
        super().fill(whole, tensors, world)
        self._keep(vector, whole)

    def _whole(self, vector: Tensor) -> Tensor:
        """Return the complete vector of which each process has a slice."""
        slices = self._world.gather(vector)
        whole = torch.empty_like(self.local)
        for piece in self._pieces:
            whole[piece.start : piece.stop].view(self._world.size, -1).copy_(self._part(slices, piece))
        return whole

    def _keep(self, vector: Tensor, whole: Tensor) -> None:
        """Copy this process's slice of a complete vector into a vector of this layout."""
        for piece in self._pieces:
            parts = whole[piece.start : piece.stop].view(self._world.size, -1)
            self._part(vector, piece).copy_(parts[self._world.rank])

    def _part(self, slices: Tensor, piece: _Piece) -> Tensor:
        """Return a process's part of a piece, from its slice [..., size / world size]."""
        return slices[..., piece.start // self._world.size : piece.stop // self._world.size]

    def _at(self, start: int) -> _Piece:
        return next(piece for piece in self._pieces if piece.start <= start < piece.stop)
