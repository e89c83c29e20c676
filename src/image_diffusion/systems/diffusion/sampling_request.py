"""Conditions of requested images, other than seeds and classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from image_diffusion.core.classes import ClassLabel


@dataclass(frozen=True)
class SamplingRequest:
    """Conditions of a request for images.

    titles: the title of each image in grids, such as its prompt; empty: none. conditions: the network's conditions by
    name, [P, …]; image i takes row i modulo P. null: the condition that guidance leads away from, by name, unless it is
    zeros. labels: the class that each image should show, int64 [N], if the conditions determine it. classes: the name
    of each image's class, for its title; empty: none. described: entries of samples.json: "prompts" of each image,
    "embeddings" with their origin, and so on. drawn: pictures shown above the images, such as masks, float32 [P, C, H,
    W] in [-1, 1]; None: none.
    """

    titles: list[str] = field(default_factory=list)
    conditions: dict[str, Tensor] = field(default_factory=dict)
    null: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    classes: list[ClassLabel] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    drawn: Tensor | None = None

    def select(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the conditions of some of the images, by their numbers."""
        return {name: tensor[rows % len(tensor)] for name, tensor in self.conditions.items()}


def joined(requests: Iterable[SamplingRequest]) -> SamplingRequest:
    """Return one request with the conditions of several requests."""
    parts = list(requests)
    return SamplingRequest(
        titles=[", ".join(of_image) for of_image in zip(*(part.titles for part in parts if part.titles), strict=True)],
        conditions={name: tensor for part in parts for name, tensor in part.conditions.items()},
        null={name: tensor for part in parts for name, tensor in part.null.items()},
        labels=next((part.labels for part in parts if part.labels is not None), None),
        described={key: value for part in parts for key, value in part.described.items()},
        drawn=next((part.drawn for part in parts if part.drawn is not None), None),
    )
