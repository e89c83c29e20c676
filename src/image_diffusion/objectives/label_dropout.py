"""Label dropout, which trains one network with and without a condition (Ho & Salimans 2022, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from image_diffusion.core.config.base import Sparse
from image_diffusion.core.types import Batch, DataSpec


class DropsConditionParts(Sparse):
    """Base of objectives that can drop each part of a condition separately."""

    if_set: ClassVar[frozenset[str]] = frozenset({"drop_probabilities"})
    learns_intervals: ClassVar[bool] = False
    """True if the network is conditioned on intervals."""

    drop_probabilities: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    """Probability that only this part of the condition is dropped, by the part's type, in addition to
    label_drop_probability, which drops all parts. Needed for guidance with one scale for each part
    (sample.guidance.scales)."""


class LabelDropout:
    """Replaces the class of a sample by the null label, num_classes, and its other conditions, such as a caption, by
    zeros, with a probability, independently for each sample. Each condition may also be dropped separately (Brooks et
    al. 2023, "InstructPix2Pix", section 3.2.1)."""

    def __init__(self, probability: float, spec: DataSpec, alone: Mapping[str, float] | None = None) -> None:
        """alone: probability that only this condition is dropped, by name. Raises ValueError for data without classes
        or captions, unless the probability is 0."""
        if probability > 0 and spec.num_classes == 0 and not spec.conditions:
            raise ValueError(
                f"label_drop_probability is {probability} but the data have no classes. "
                "Set it to 0, or use labelled data."
            )
        self._probability, self._alone = probability, dict(alone or {})
        self._names = ({"label": spec.num_classes} if spec.num_classes else {}) | dict.fromkeys(spec.conditions, 0)

    def __call__(self, batch: Batch, network: Any) -> dict[str, torch.Tensor]:
        """Return the batch's conditions, some of them dropped if the network is in training mode."""
        if (self._probability == 0 and not self._alone) or not getattr(network, "training", True):
            return batch.cond
        all_dropped, cond, null = self.dropped(batch, network), dict(batch.cond), self.null(batch.cond)
        for name in self._names:
            dropped = all_dropped
            if name in self._alone:
                dropped = dropped | batch.streams.event(f"{name}_drop_alone", self._alone[name])
            cond[name] = torch.where(dropped.view(-1, *[1] * (cond[name].ndim - 1)), null[name], cond[name])
        return cond

    def dropped(self, batch: Batch, network: Any) -> torch.Tensor:
        """Draw the samples whose conditions are all dropped. Bool [B]."""
        probability = self._probability if getattr(network, "training", True) else 0.0
        return batch.streams.event("label_drop", probability)

    def null(self, cond: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the conditions of a batch with all of them dropped."""
        return cond | {name: torch.full_like(cond[name], null) for name, null in self._names.items()}
