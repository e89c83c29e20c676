"""Perceptual term: the difference between an image and its reconstruction in the features of a fixed network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from image_diffusion.core.types import Batch, Losses, Objective


class RecordingNetwork:
    """Codec's network that stores its last reconstruction, the first output converted by its `images`: [B, C, H, W],
    nominally in [-1, 1]."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.reconstruction: Tensor

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._network(*inputs)
        self.reconstruction = self._network.images(outputs[0])
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class Perceptual(Objective):
    """A codec's objective plus `weight` times a perceptual distance of images, as in VQGAN (Esser et al. 2021,
    arXiv:2012.09841). Part "perceptual": the unweighted distance.

    distance: two sets of images [B, C, H, W] in [-1, 1] -> [B].
    """

    def __init__(self, objective: Objective, distance: Callable[[Tensor, Tensor], Tensor], weight: float) -> None:
        self._objective, self._distance, self._weight = objective, distance, weight

    def __call__(self, network: Any, batch: Batch) -> Losses:
        watched = RecordingNetwork(network)
        losses = self._objective(watched, batch)
        distance = self._distance(watched.reconstruction, batch.x).to(losses.loss.dtype)
        parts = losses.parts | {"perceptual": distance.detach()}
        return Losses(losses.loss + self._weight * distance, parts, losses.time, losses.seen)
