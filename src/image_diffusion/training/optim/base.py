"""Base of all optimizers in this folder: a PyTorch optimizer on parts of the flat vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, dtype, nn

from image_diffusion.core.config.base import Config
from image_diffusion.training.parallel.flat_parameters import Flat, Layout, Vector

Probability = Annotated[float, Field(ge=0, lt=1)]
Kind = Callable[..., torch.optim.Optimizer]


class OptimizerConfig(Config, ABC):
    """Interface of every optimizer's configuration."""

    conflicts: ClassVar[Mapping[str, str]] = {}
    """Values of `train.sharding` that this optimizer does not support, each with the reason."""

    needs_network: ClassVar[bool] = False
    """True if this optimizer implements `check`."""

    def check(self, trained: Collection[str]) -> None:
        """Raise ValueError if this optimizer has nothing to update, or lacks a package. trained: weights that
        `nn.blocks.inner_matrices` names and that are not frozen."""

    @abstractmethod
    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        """Return the optimizer of these parameters. factors: factors of the learning rates, by name; unset: 1. Raises
        ValueError as `check` does."""


class Piece(NamedTuple):
    """Consecutive parameters of the flat layout, start … stop, with the same learning rate and weight decay, all
    matrices or none. name: of the first parameter. A piece may be empty, so that their number is always the same."""

    name: str
    start: int
    stop: int
    factor: float
    decay: float


def pieces(
    flat: Flat,
    factors: Mapping[str, float] | None,
    decay: float = 0.0,
    decay_vectors: bool = False,
    alone: Container[str] = (),
) -> list[Piece]:
    """Return the layout, cut where the factors of neighbours differ. decay: weight decay of matrices, and of the rest
    if `decay_vectors`. alone: names of parameters that are each a separate piece."""
    factors = factors or {slot.name: 1.0 for slot in flat.slots}
    cuts = {
        b.start
        for a, b in pairwise(flat.slots)
        if factors[a.name] != factors[b.name] or a.name in alone or b.name in alone
    }
    ends = sorted([0, flat.matrices_end, flat.size, *(cuts - {flat.matrices_end})])
    name_at = {slot.start: slot.name for slot in flat.slots} | {flat.size: ""}
    return [
        Piece(
            name_at[start],
            start,
            stop,
            factor=factors.get(name_at[start], 1.0),
            decay=decay if decay_vectors or start < flat.matrices_end else 0.0,
        )
        for start, stop in pairwise(ends)
    ]


class FlatOptimizer:
    """An optimizer on pieces of the flat vectors.

    layouts: layouts of its moments, by name. moments: vectors of the moments, of the dtype `stored` (unset: float32).
    steps: float32, number of updates of each piece, on the device, where the optimizer counts them.
    """

    torch: torch.optim.Optimizer

    def __init__(
        self,
        flat: Flat,
        cut: Sequence[Piece],
        moments: Mapping[str, Layout],
        lr: float,
        kind: Kind,
        stored: dtype | None = None,
        **settings: Any,
    ) -> None:
        self._lr, self.layouts = lr, moments
        zeros = partial(flat.values.new_zeros, dtype=stored)
        self.moments = {name: zeros(layout.place(layout.size)) for name, layout in moments.items()}
        starts = {name: {slot.name: slot.start for slot in layout.slots} for name, layout in moments.items()}
        self.steps = torch.zeros(len(cut), device=flat.values.device)
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, Any] = {}
        for i, (first, start, stop, factor, decay) in enumerate(cut):
            if start == stop:
                continue
            begin, end = flat.place(start), flat.place(stop)  # may be empty in this process; the step counts
            part = nn.Parameter(flat.values[begin:end])
            part.grad = flat.gradient[begin:end]
            groups.append({"params": [part], "weight_decay": decay, "factor": factor})
            own = {
                name: vector[moments[name].place(starts[name][first]) :][: end - begin]
                for name, vector in self.moments.items()
            }
            states[part] = {"step": self.steps[i], **own}
        self.torch = kind(groups, lr=lr, **settings)
        self.torch.state.update(states)

    def state_dict(self) -> dict[str, Tensor | Vector]:
        """Return the moments and the number of updates, which a checkpoint is loaded into."""
        moments = {f"{name}/": Vector(self.layouts[name], vector) for name, vector in self.moments.items()}
        return {"steps": self.steps, **moments}

    def set_rate(self, factor: float) -> float:
        """Set the learning rate of the next update to a multiple of the configured one, and return the rate of
        parameters with a factor of 1."""
        for group in self.torch.param_groups:
            group["lr"] = self._lr * factor * group["factor"]
        return self._lr * factor
