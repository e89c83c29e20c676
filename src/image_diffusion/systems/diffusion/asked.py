"""What a person asks images for with, beside seeds and classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """What images are asked for with. titles: of each image, what a person wrote; none where nothing was written. told:
    by name, [P, …]: image i is told row i modulo P. null: by name, what guidance leads away from, if it is not zeros.
    labels: the class that each image is to show, int64 [N], where that is known of what it is told. source: where that
    came from, for samples.json.
    """

    titles: list[str] = field(default_factory=list)
    told: dict[str, Tensor] = field(default_factory=dict)
    null: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    source: dict[str, Any] = field(default_factory=dict)

    def of(self, rows: Tensor) -> dict[str, Tensor]:
        """What some of the images are told, by their numbers."""
        return {name: each[rows % len(each)] for name, each in self.told.items()}
