"""Initial weights from another training, on other classes or at another resolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config, differing_keys, dump
from image_diffusion.core.resolution import Size
from image_diffusion.core.types import DataSpec


@dataclass(frozen=True)
class WarmStart:
    """Tensors of a system's network that change with other classes or another resolution.

    class_rows: with a row for each class, and optionally a null row; rows are matched by class. positions: [1, N, D],
    with a row for each cell of a grid; interpolated for another grid. new_layers: prefixes of tensors that the weights
    may lack; they are initialised as in a new network, where they have no effect. scaled_by: keys of the system that
    define how stored values become x, which must be equal.
    """

    class_rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    new_layers: tuple[str, ...] = ()
    scaled_by: tuple[str, ...] = ()


class Adaptable(Config):
    """A system whose training can start from the weights of another training."""

    type: str
    """Name of the system."""

    warm_start: ClassVar[WarmStart] = WarmStart()
    """Tensors that may differ from the loaded weights."""

    def started_shape(self) -> tuple[int, int, int, int]:
        """Return depth, width, heads and patch of the transformer, for proposals to train from its weights. Raises
        ValueError with the reason if there can be none."""
        raise ValueError(f"are a {self.type}")


@dataclass(frozen=True)
class Trained:
    """Origin of weights. classes: their names by number; None if only numbers are known, as for published weights.
    pairs: description of the additional sets, by kind."""

    system: Adaptable
    spec: DataSpec
    classes: Sequence[str] | None
    pairs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> str:
        """Return the names of the numbers that the network takes, in order; empty if it takes none."""
        return ", ".join(self.pairs.get("numbers", {}).get("columns", ()))


@dataclass(frozen=True)
class Change:
    """A tensor that differs from the loaded one. here, there: shapes in the network and in the weights; empty if it is
    missing. effect: the adaptation, in words."""

    name: str
    here: tuple[int, ...]
    there: tuple[int, ...]
    effect: str


def fitted(
    network: nn.Module, target: Trained, tensors: Mapping[str, Tensor], source: Trained
) -> tuple[dict[str, Tensor], list[Change]]:
    """Return initial tensors for a network, and their differences from the loaded weights. Class rows are matched by
    name; other classes start from the mean row and a random one; positions of another resolution are interpolated
    (bicubic). If only one of the two has classes, their table is new or omitted. Raises ValueError for any other
    difference of shape or name, with the configuration that would fit, and for weights that were trained on another
    scale of x, with other numbers or with other heads of attention.
    """
    if target.columns and source.columns and target.columns != source.columns:
        raise ValueError(
            f"the weights were trained with the numbers {source.columns}, but pairs.columns is {target.columns}. Give "
            f"it the same names in the same order."
        )
    for key in target.system.warm_start.scaled_by:
        if getattr(target.system, key) != getattr(source.system, key):
            raise ValueError(
                f"system.{key} differs from the value that the weights were trained with, so x would have another "
                f"scale. Copy the value from the model.json next to the weights."
            )
    differing, initial = target.system.warm_start, network.state_dict()
    weights, changes, wrong = dict(initial), [], []

    def differs(name: str, effect: str) -> None:
        shape, source_shape = (
            tuple(tensors_of[name].shape) if name in tensors_of else () for tensors_of in (initial, tensors)
        )
        changes.append(Change(name, shape, source_shape, effect))

    def moved(name: str, tensor: Tensor) -> bool:
        """Return True for positions on a grid of other sides, even with the same number of cells."""
        if name not in differing.positions:
            return False
        return _grid(tensor.shape[1], source.spec.size) != _grid(tensor.shape[1], target.spec.size)

    for name, tensor in initial.items():
        loaded = tensors.get(name)
        if name in differing.class_rows and loaded is None:
            differs(name, "new: the weights know no classes")
        elif loaded is None and name.startswith(differing.new_layers):
            differs(name, "new: the weights lack the layer")
        elif loaded is not None and name in differing.class_rows and loaded.shape[1:] == tensor.shape[1:]:
            weights[name], effect = _rows(loaded, tensor, target, source)
            if effect:
                differs(name, effect)
        elif loaded is not None and loaded.shape == tensor.shape and not moved(name, tensor):
            weights[name] = loaded
        elif loaded is not None and name in differing.positions and loaded.shape[2:] == tensor.shape[2:]:
            weights[name] = _interpolated(loaded, source.spec.size, tensor.shape[1], target.spec.size)
            differs(name, "interpolated to the other resolution")
        else:
            wrong.append(
                f"{name} {list(tensor.shape)} here, {list(loaded.shape) if loaded is not None else 'none'} there"
            )
    for name in tensors.keys() - initial.keys():
        if name in differing.class_rows:
            differs(name, "left out: the data have no classes")
        else:
            wrong.append(f"{name} none here, {list(tensors[name].shape)} there")
    if wrong:
        keys = differing_keys(_decides(target), _decides(source))
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"Weights do not fit the network: {'; '.join(wrong[:_SHOWN])}{more}. Other classes and another resolution "
            f"would; these would fit with the values that they were trained with: {', '.join(keys)}."
        )
    if heads := differing_keys(_heads(target), _heads(source), "system.network."):
        raise ValueError(
            f"{', '.join(heads)} differs from the value that the weights were trained with, so attention would have "
            f"other heads. Give it the value of the weights."
        )
    return weights, changes


def other_settings(target: Trained, source: Trained) -> list[str]:
    """Return the settings that differ from those of the weights and do not affect shapes, each with both values; for a
    part of another type, only the type."""
    ours, theirs = ({"system": dump(trained.system), "pairs": dict(trained.pairs)} for trained in (target, source))
    for settings in (ours, theirs):
        for key in _NO_SETTINGS:
            settings["system"].get("network", {}).pop(key, None)
    keys = differing_keys(ours, theirs)
    types = tuple(key.partition("type (")[0] for key in keys if ".type (" in key)
    return [key for key in keys if ".type (" in key or not key.startswith(types)]


def table(changes: Sequence[Change]) -> str:
    """Return the differences from the loaded weights, one per line; empty without differences."""
    rows = [("tensor", "there", "here", "")] + [
        (change.name, _shape(change.there), _shape(change.here), change.effect) for change in changes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines) if changes else ""


_SHOWN = 4
_NO_SETTINGS = ("size", "depth", "width", "num_heads", "patch", "gradient_checkpointing")
"""Keys of a network that `fitted` compares, or that do not affect its results."""


def _decides(trained: Trained) -> dict[str, Any]:
    """Return the part of a configuration that determines the shapes of a network."""
    system = dump(trained.system)
    objective = system.get("objective", {})
    return {
        "channels of x": trained.spec.channels,
        "system.network": system.get("network"),
        "system.objective.variance": objective.get("variance"),
    }


def _heads(trained: Trained) -> dict[str, Any]:
    """Return the settings of attention heads, which affect the results of a network, but not always its shapes."""
    network = getattr(trained.system, "network", None)
    named = getattr(network, "shape", network)  # for a DiT, the settings of its size
    names = ("num_heads", "num_heads_upsample", "head_channels", "head_width")
    return {name: getattr(named, name) for name in names if hasattr(named, name)}


def _rows(loaded: Tensor, own: Tensor, target: Trained, source: Trained) -> tuple[Tensor, str]:
    """Return a row for each class and, if there is one, the null row; and a description of the changes, empty without
    changes.

    own: the network's random rows, added to the mean so that new classes differ from one another at the start.
    """
    loaded, own = _with_numbers(loaded), _with_numbers(own)
    count, num_rows = target.spec.num_classes, len(own)
    class_rows = loaded[: source.spec.num_classes]
    mean = class_rows.mean(dim=0, keepdim=True)
    null = loaded[source.spec.num_classes :] if len(loaded) > len(class_rows) else mean
    if target.classes is None or source.classes is None:  # the same number of classes: assumed the same, in order
        places: list[int | None] = list(range(count)) if count == len(class_rows) else [None] * count
    else:
        numbers = {name: number for number, name in enumerate(source.classes)}
        places = [numbers.get(name) for name in target.classes]
    rows = [mean + own[i : i + 1] if place is None else class_rows[place : place + 1] for i, place in enumerate(places)]
    joined = torch.cat([*rows, null[: num_rows - count]]).contiguous()
    assert len(joined) == num_rows
    if places == list(range(len(class_rows))) and num_rows == len(loaded):
        return joined, ""
    by_name = sum(place is not None for place in places)
    return joined, f"{by_name} of {count} classes by name, the others near the mean row"


def _interpolated(positions: Tensor, size: Size, new_count: int, new_size: Size) -> Tensor:
    """Interpolate positions [1, n, D] for images of a size -> [1, new_count, D] for images of another size."""
    grid = _with_numbers(positions).unflatten(1, _grid(positions.shape[1], size)).permute(0, 3, 1, 2)
    resized = F.interpolate(grid.float(), _grid(new_count, new_size), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).reshape(1, new_count, -1).to(positions.dtype)


def _grid(count: int, size: Size) -> Size:
    """Return the rows and columns of a grid of `count` square cells on an image of a size."""
    rows = math.isqrt(count * size[0] // size[1])
    return rows, count // rows


def _with_numbers(tensor: Tensor) -> Tensor:
    """Return zeros in place of a meta tensor, whose arithmetic would load PyTorch's compiler, which takes seconds."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "none"
