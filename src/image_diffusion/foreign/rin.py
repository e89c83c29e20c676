"""The training states of lucidrains/recurrent-interface-network-pytorch: `model-N.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.systems.diffusion.rin import RinSystem

_KEY = "axial_pos_emb_height_mlp.1.weight"
_PLACES = (("ema", "ema_model.model."), ("ema", "ema_model."), ("model", "model."), ("model", ""), (None, "model."))


def read_rin(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Return a RIN of lucidrains' trainer, as an experiment describes it."""
    entry_and_tensors = rin_of(content)
    if entry_and_tensors is None:
        return None
    entry, tensors = entry_and_tensors
    experiment = described(RinSystem)
    if experiment is None:
        raise ValueError(
            f"{path} is a RIN, but its tensors do not determine its image size, its heads and its noise. Give an "
            f"experiment file that describes it: --experiment."
        )
    spec = DataSpec(channels=experiment.data.num_channels, resolution=experiment.data.resolution)
    weights = checked_weights(experiment.system, spec, tensors, path, "RIN")
    unread = tuple(name for name in content if name != entry) if entry else ()
    description = f"a RIN, its entry {entry}" if entry else "a RIN"
    return ForeignWeights(weights, experiment.system, spec, description, unread)


def rin_of(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Tensor]] | None:
    """Return the entry with the network, empty if the file is the network itself, and its tensors by name. The average
    is preferred to the raw weights. None if the file contains no RIN.
    """
    for entry, prefix in (*_PLACES, (None, "")):
        inner = content if entry is None else content.get(entry)
        if isinstance(inner, Mapping) and isinstance(inner.get(f"{prefix}{_KEY}"), Tensor):
            named = ((str(name), tensor) for name, tensor in inner.items() if isinstance(tensor, Tensor))
            return entry, {name.removeprefix(prefix): tensor for name, tensor in named if name.startswith(prefix)}
    return None
