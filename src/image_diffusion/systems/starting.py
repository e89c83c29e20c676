"""Weights of one training as the start of another, on other classes or at another resolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config import differing_keys, dump
from image_diffusion.core.types import DataSpec

if TYPE_CHECKING:
    from image_diffusion.systems.system import System


@dataclass(frozen=True)
class Trained:
    """What weights are of. classes: their names by number; none where numbers are all that is known of them, as of
    weights that others published."""

    system: System
    spec: DataSpec
    classes: Sequence[str] | None


@dataclass(frozen=True)
class Change:
    """A tensor that does not start as it was. here, there: shapes; empty where it is missing."""

    name: str
    here: tuple[int, ...]
    there: tuple[int, ...]
    told: str


def fitted(
    network: nn.Module, ours: Trained, tensors: Mapping[str, Tensor], theirs: Trained
) -> tuple[dict[str, Tensor], list[Change]]:
    """Tensors to start a network from, and what is not as it was.

    Rows of classes go by name; other classes start from the mean row and a random one; positions of another
    resolution are interpolated (bicubic). Where only one of the two knows classes, their table is new, or left out.
    Raises ValueError for any other difference of shape or name, with what of the configuration would fit, and for
    weights that were trained on another x.
    """
    for key in ours.system.scaled_by:
        if getattr(ours.system, key) != getattr(theirs.system, key):
            raise ValueError(
                f"system.{key} is another than the weights were trained with, so that x would be. Take theirs from the "
                f"model.json beside the weights."
            )
    system, own = ours.system, network.state_dict()
    found, changes, wrong = dict(own), [], []

    def differs(name: str, told: str) -> None:
        here, there = (tuple(each[name].shape) if name in each else () for each in (own, tensors))
        changes.append(Change(name, here, there, told))

    for name, tensor in own.items():
        given = tensors.get(name)
        if name in system.class_rows and given is None:
            differs(name, "new: the weights know no classes")
        elif given is None and name.startswith(system.new_layers):
            differs(name, "new: the weights lack the layer")
        elif given is not None and name in system.class_rows and given.shape[1:] == tensor.shape[1:]:
            found[name], told = _rows(given, tensor, ours, theirs)
            if told:
                differs(name, told)
        elif given is not None and given.shape == tensor.shape:
            found[name] = given
        elif given is not None and name in system.positions and given.shape[2:] == tensor.shape[2:]:
            found[name] = _interpolated(given, tensor.shape[1])
            differs(name, "interpolated to the other resolution")
        else:
            wrong.append(
                f"{name} {list(tensor.shape)} here, {list(given.shape) if given is not None else 'none'} there"
            )
    for name in tensors.keys() - own.keys():
        if name in system.class_rows:
            differs(name, "left out: the data have no classes")
        else:
            wrong.append(f"{name} none here, {list(tensors[name].shape)} there")
    if wrong:
        keys = differing_keys(_decides(ours), _decides(theirs))
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"Weights do not fit the network: {'; '.join(wrong[:_SHOWN])}{more}. Other classes and another resolution "
            f"would; these would fit with the values that they were trained with: {', '.join(keys)}."
        )
    return found, changes


def table(changes: Sequence[Change]) -> str:
    """What is not as it was, a line each; empty where everything is."""
    rows = [("tensor", "there", "here", "")] + [
        (each.name, _shape(each.there), _shape(each.here), each.told) for each in changes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines) if changes else ""


_SHOWN = 4


def _decides(each: Trained) -> dict[str, Any]:
    """What of a configuration decides the shapes of a network."""
    system = dump(each.system)
    objective = system.get("objective", {})
    return {
        "channels of x": each.spec.channels,
        "system.network": system.get("network"),
        "system.objective.variance": objective.get("variance"),
    }


def _rows(given: Tensor, own: Tensor, ours: Trained, theirs: Trained) -> tuple[Tensor, str]:
    """A row for each class, and the one for none where there is one; and what was done, empty where nothing was.

    own: the random rows of the network, by which classes that start from the mean differ from the first step on.
    """
    given, own = _here(given), _here(own)
    count, wanted = ours.spec.num_classes, len(own)
    known = given[: theirs.spec.num_classes]
    mean = known.mean(dim=0, keepdim=True)
    null = given[theirs.spec.num_classes :] if len(given) > len(known) else mean
    if ours.classes is None or theirs.classes is None:  # as many classes are the same ones, in their order
        places: list[int | None] = list(range(count)) if count == len(known) else [None] * count
    else:
        numbers = {name: number for number, name in enumerate(theirs.classes)}
        places = [numbers.get(name) for name in ours.classes]
    rows = [mean + own[i : i + 1] if place is None else known[place : place + 1] for i, place in enumerate(places)]
    joined = torch.cat([*rows, null[: wanted - count]]).contiguous()
    assert len(joined) == wanted
    if places == list(range(len(known))) and wanted == len(given):
        return joined, ""
    by_name = sum(place is not None for place in places)
    return joined, f"{by_name} of {count} classes by name, the others near the mean row"


def _interpolated(positions: Tensor, count: int) -> Tensor:
    """[1, n, D] over a square grid -> [1, count, D] over another."""
    there, here = math.isqrt(positions.shape[1]), math.isqrt(count)
    grid = _here(positions).view(1, there, there, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(grid.float(), (here, here), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).reshape(1, count, -1).to(positions.dtype)


def _here(tensor: Tensor) -> Tensor:
    """Zeros in place of a tensor without numbers, whose arithmetic would load PyTorch's compiler: seconds."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "none"
