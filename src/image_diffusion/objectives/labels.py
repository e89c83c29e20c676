"""Label dropout, which trains one network with and without a condition (Ho & Salimans 2022, algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch

from image_diffusion.core.types import Batch, DataSpec


class LabelDropout:
    """Replaces a sample's class by the null label, num_classes, with some probability, each sample on its own; and what
    else the network is told of the image, such as its caption, by zeros."""

    def __init__(self, probability: float, spec: DataSpec) -> None:
        """Raises ValueError for data without classes or captions, unless the probability is 0."""
        if probability > 0 and spec.num_classes == 0 and not spec.conditions:
            raise ValueError(
                f"label_drop_probability is {probability} but the data have no classes. "
                "Set it to 0, or use labelled data."
            )
        self._probability, self._spec = probability, spec

    def __call__(self, batch: Batch, network: Any) -> dict[str, torch.Tensor]:
        """The batch's cond, with some of the labels [B] dropped while the network is trained; validation keeps all."""
        if self._probability == 0 or not getattr(network, "training", True):
            return batch.cond
        dropped, cond = batch.streams.event("label_drop", self._probability), dict(batch.cond)
        if self._spec.num_classes:
            cond["label"] = torch.where(dropped, self._spec.num_classes, cond["label"])
        for name, shape in self._spec.conditions.items():
            cond[name] = cond[name].masked_fill(dropped.view(-1, *[1] * len(shape)), 0)
        return cond
