"""All parameters of a network in one contiguous vector, and their gradients in another.

Every parameter becomes a view of the vector, and its gradient a view of the gradient's vector. Operations on all
parameters (sum over processes, norm, clipping, Adam, averages, copies to the host) are then one operation on one
tensor, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from image_diffusion.nn.blocks import inner_matrices
from image_diffusion.training.parallel.world import World

ALIGN = 16  # elements: each parameter starts at a multiple of 64 bytes, as if it had been allocated on its own
_PIECE = 8 * 1024 * 1024  # elements summed at once: 32 MiB


class Work(Protocol):
    """Handle of a collective operation in progress."""

    def wait(self) -> object:
        """Wait for the operation; on a GPU, make all later kernels wait for it."""
        ...


@dataclass(frozen=True)
class Sum:
    """Sum over processes in progress. into: the destination of the result, possibly of another dtype."""

    work: Work
    made: Tensor
    into: Tensor

    def wait(self) -> None:
        """Wait for the result."""
        self.work.wait()
        if self.made.dtype != self.into.dtype:
            self.into.copy_(self.made)


@dataclass(frozen=True)
class Slot:
    """Position of a parameter in the flat layout."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, vector: Tensor, start: int = 0) -> Tensor:
        """Return the parameter in a vector that begins at `start` of the layout, in the parameter's shape."""
        return vector.as_strided(self.shape, self.stride, vector.storage_offset() + self.start - start)


class Layout:
    """Positions of tensors in one vector, in the given order, with gaps of zeros. size: elements of the vector.

    align: every tensor starts at a multiple of this number of elements. Matrices (`is_matrix`), if they are given
    first, are in 0 … matrices_end, followed by vectors and scalars, so that weight decay can exclude these.
    """

    def __init__(self, tensors: Mapping[str, Tensor], align: int = ALIGN) -> None:
        self.slots: list[Slot] = []
        self.matrices_end, end = 0, 0
        for name, tensor in tensors.items():
            layout = torch.empty_like(tensor, device="meta")  # dense, and channels-last where the tensor is
            self.slots.append(Slot(name, end, tuple(layout.shape), layout.stride()))
            end += -(-tensor.numel() // align) * align
            if is_matrix(name, tensor):
                self.matrices_end = end
        self.size = end

    def place(self, start: int) -> int:
        """Return the position in this process's vectors of its first element at or after `start` of the layout."""
        return start

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the tensors in a vector of this layout as views."""
        return [slot.within(vector) for slot in self.slots]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector as tensors by name. All processes call it together."""
        return {slot.name: view for slot, view in zip(self.slots, self.views(vector), strict=True)}

    def checkpoint_tensors(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a checkpoint's tensors of a vector, by name: complete tensors in the first process, and this process's
        rows of sharded tensors. All processes call it together."""
        return self.named(vector), {}

    def fill(self, vector: Tensor, tensors: Mapping[str, Tensor] | None, world: World) -> None:
        """Copy tensors by name from the first process into a vector of this layout in every process."""
        if tensors is not None:
            for slot, view in zip(self.slots, self.views(vector), strict=True):
                view.copy_(tensors[slot.name])
        world.broadcast(vector)


class Vector(NamedTuple):
    """A vector of a layout."""

    layout: Layout
    values: Tensor


class Flat(Layout):
    """The trainable parameters of a network, matrices first. values, gradient: float32 [size]. inner: the result of
    `nn.blocks.inner_matrices`.

    reduce: dtype in which gradients are summed over processes. local: gradient of this process's examples, which the
    backward pass fills, for the whole layout, in `pieces` (start, stop) from its end to its start. Its sum over all
    processes is `gradient`.

    Raises ValueError when nothing is trainable or a parameter is not float32.
    """

    sums_gradients = False
    """True if the backward pass already adds up the gradients of all processes."""
    is_whole = True
    """True if each process stores every parameter completely."""
    writers = 1
    """Number of processes that write a checkpoint; these are the first ones."""

    def __init__(self, network: nn.Module, reduce: torch.dtype = torch.float32) -> None:
        self.parameters, self.inner, self._reduce = trainable(network), inner_matrices(network), reduce
        self._lay_out(self.parameters, next(network.parameters()).device)
        for parameter, value, gradient in zip(
            self.parameters.values(), self.views(self.values), self.views(self.gradient), strict=True
        ):
            value.copy_(parameter.data)
            parameter.data = value
            parameter.grad = gradient

    def begin(self) -> None:
        """Prepare for the backward passes of a step, which add up to `local`."""
        self.local.zero_()

    def before_pass(self, last: bool) -> None:
        """Prepare for a backward pass. last: True for the last of a step. Nothing to do: `begin_sum` sums gradients."""

    def finish(self) -> None:
        """Finish the backward passes of a step. Nothing to do: a gradient that no backward pass reached is zero."""

    def begin_sum(self, start: int, stop: int) -> Work:
        """Begin to add up a piece of `local` over all processes. All of them call it together."""
        piece = self.gradient[start:stop]
        rounded = piece.to(self._reduce)
        return Sum(cast("Work", dist.all_reduce(rounded, async_op=True)), rounded, piece)

    def take(self, share: Tensor, world: World) -> None:
        """Set the gradient from the shares of all processes: consecutive parts of equal size of the layout, with
        padding at the end. All processes call it together."""
        self.gradient.copy_(world.gather(share).flatten()[: self.size])

    def _lay_out(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Lay out tensors in this order, and create the vectors `values` and `gradient` of zeros on a device."""
        super().__init__(tensors)
        self.values = torch.zeros(self.size, device=device)
        self.gradient = torch.zeros_like(self.values)
        self.local, self.pieces = self.gradient, cut(self)

    def subset(self, names: Container[str]) -> Layout:
        """Return the layout of these parameters alone."""
        return Layout({name: parameter for name, parameter in self.parameters.items() if name in names})

    def norm(self) -> Tensor:
        """Return the norm of the gradient, [] on the device, the same in every process."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def update_network(self) -> None:
        """Update the network's weights after a change of `values`. Nothing to do: parameters are views of it."""

    @contextmanager
    def with_weights(self, vector: Tensor) -> Iterator[None]:
        """Give the network the weights of a vector of this layout in this context, complete in every process, so that
        each can compute without the others. All processes enter it together."""
        kept = self.values.clone()
        self.values.copy_(vector)
        try:
            yield
        finally:
            self.values.copy_(kept)


def cut(layout: Layout, apart: Container[str] = ()) -> list[tuple[int, int]]:
    """Return the pieces of a layout, start … stop, in the order of a backward pass, from the end to the start; vectors
    last. apart: names of matrices that share no piece with matrices outside of `apart`."""
    pieces, stop = [], layout.matrices_end
    matrices = [slot for slot in layout.slots if slot.start < layout.matrices_end]
    for before, slot in zip([None, *matrices][:-1][::-1], matrices[::-1], strict=True):
        ends = before is None or (before.name in apart) != (slot.name in apart)
        if ends or stop - slot.start >= _PIECE:
            pieces.append((slot.start, stop))
            stop = slot.start
    if layout.size > layout.matrices_end:
        pieces.append((layout.matrices_end, layout.size))
    return pieces


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Return True for two dimensions or more, except for the gains of RIN's heads, [heads, 1, d]."""
    return tensor.ndim >= 2 and not name.endswith(("q_norm.gamma", "k_norm.gamma"))


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with a gradient by name, matrices first. Raises ValueError as `Flat` does."""
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("The network has no trainable parameter. Train one that has.")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise ValueError(f"Parameter {name} is {parameter.dtype}; training keeps float32 masters.")
    return dict(sorted(named, key=lambda item: not is_matrix(*item)))
