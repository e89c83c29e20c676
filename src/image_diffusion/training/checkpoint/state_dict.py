"""Save the state of a trainer's components in the groups of a checkpoint, and load it in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from image_diffusion.training.parallel.flat_parameters import Vector
from image_diffusion.training.parallel.world import World

StateDict = Mapping[str, Tensor | Vector]
"""Tensors by name, the same in every process; and vectors by the prefix of their tensors' names."""
Groups = dict[str, dict[str, Tensor]]


class Stateful(Protocol):
    """Component whose state is small: each process loads all of it. Either tensors or plain data."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state. All processes call it together."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Resume from the state that `state_dict` returned."""
        ...


def add_tensors(group: str, state: StateDict, groups: Groups, rows: Groups) -> None:
    """Add the tensors of a state to a group, and this process's rows of sharded tensors. All processes call it
    together."""
    for name, value in state.items():
        if isinstance(value, Vector):
            for destination, tensors in zip((groups, rows), value.layout.checkpoint_tensors(value.values), strict=True):
                if tensors:  # no empty file
                    destination.setdefault(group, {}).update({f"{name}{key}": part for key, part in tensors.items()})
        else:
            groups.setdefault(group, {})[name] = value


def load_in_place(state: StateDict, tensors: Mapping[str, Tensor] | None, world: World) -> None:
    """Copy the tensors of a group from the first process into those of a state in every process. All processes call it
    together."""
    for name, value in state.items():
        if isinstance(value, Vector):
            own = None
            if tensors is not None:
                own = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
            value.layout.fill(value.values, own, world)
        else:
            if tensors is not None:
                value.copy_(tensors[name])
            world.broadcast(value)
