"""The training states of lucidrains/recurrent-interface-network-pytorch: `model-N.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_KEY = "axial_pos_emb_height_mlp.1.weight"
_PLACES = (("ema", "ema_model.model."), ("ema", "ema_model."), ("model", "model."), ("model", ""), (None, "model."))


def rin_of(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Tensor]] | None:
    """The entry that holds the network, none where the file is the network itself, and its tensors by their own names.

    The average goes before the weights as trained. None where there is no RIN.
    """
    for entry, prefix in (*_PLACES, (None, "")):
        inner = content if entry is None else content.get(entry)
        if isinstance(inner, Mapping) and isinstance(inner.get(f"{prefix}{_KEY}"), Tensor):
            named = ((str(name), each) for name, each in inner.items() if isinstance(each, Tensor))
            return entry, {name.removeprefix(prefix): each for name, each in named if name.startswith(prefix)}
    return None
