"""A network's parameters laid end to end in one vector, and their gradients in another.

Every parameter becomes a view of the vector, and its gradient a view of the gradient's vector. What is done to all of
them (sum over processes, norm, clipping, Adam, averages, copies to the host) is then one operation on one tensor, in
one order that nothing at run time can change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ALIGN = 16  # elements: each parameter starts at a multiple of 64 bytes, as if it had been allocated on its own


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Flat:
    """The trainable parameters of a network. values, gradient: float32 [size], gaps between parameters are zero.

    Matrices (two dimensions or more) lie first, in 0 … matrices_end; vectors and scalars behind them, so that weight
    decay can leave them out. Raises ValueError when nothing is trainable or a parameter is not float32.
    """

    def __init__(self, network: nn.Module) -> None:
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("The network has no trainable parameter. Train one that has.")
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(f"Parameter {name} is {parameter.dtype}; training keeps float32 masters.")
        self.parameters = dict(sorted(named, key=lambda item: item[1].ndim < 2))
        self.slots: list[Slot] = []
        self.matrices_end, end = 0, 0
        for name, parameter in self.parameters.items():
            layout = torch.empty_like(parameter, device="meta")  # dense, and channels-last where the parameter is
            self.slots.append(Slot(name, end, tuple(layout.shape), layout.stride()))
            end += -(-parameter.numel() // _ALIGN) * _ALIGN
            if parameter.ndim >= 2:
                self.matrices_end = end
        self.size = end
        self.values = torch.zeros(end, device=named[0][1].device)
        self.gradient = torch.zeros_like(self.values)
        for parameter, value, gradient in zip(
            self.parameters.values(), self.views(self.values), self.views(self.gradient), strict=True
        ):
            value.copy_(parameter.data)
            parameter.data = value
            parameter.grad = gradient

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector of this layout, one a parameter, in the parameters' shapes."""
        return [vector.as_strided(slot.shape, slot.stride, slot.start) for slot in self.slots]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The same by name."""
        return {slot.name: view for slot, view in zip(self.slots, self.views(vector), strict=True)}

    def fill(self, vector: Tensor, tensors: dict[str, Tensor]) -> None:
        """Copy tensors of these names into a vector of this layout."""
        for name, view in self.named(vector).items():
            view.copy_(tensors[name])
