"""Conditions of requested images, other than seeds and classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SamplingRequest:
    """Conditions of a request for images.

    titles: the prompt of each image; empty without prompts. conditions: the network's conditions by name, [P, …]; image
    i uses row i modulo P. null: the condition that guidance leads away from, by name, unless it is zeros. labels: the
    class that each image should show, int64 [N], if the conditions determine it. source: the origin of the conditions,
    for samples.json.
    """

    titles: list[str] = field(default_factory=list)
    conditions: dict[str, Tensor] = field(default_factory=dict)
    null: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    source: dict[str, Any] = field(default_factory=dict)

    def select(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the conditions of some of the images, by their numbers."""
        return {name: tensor[rows % len(tensor)] for name, tensor in self.conditions.items()}
