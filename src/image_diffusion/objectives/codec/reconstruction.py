"""Inputs of the additional terms of a codec's loss: the images that its network has just reconstructed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Watched:
    """Codec's network that remembers its last reconstruction: the first that it returns, as `images` of it gives it,
    [B, C, H, W] in [-1, 1] where it is right."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.reconstruction: Tensor

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._network(*inputs)
        self.reconstruction = self._network.images(outputs[0])
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)
