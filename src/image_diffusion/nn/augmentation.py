"""Conditioning of a network on the augmentation of its training images: a linear map of augmentation labels, added to
the embedding of time and class (Karras et al. 2022, arXiv:2206.00364, appendix F.2).

The map has no bias, so that omitting it is equivalent to labels of zeros, which mean an unchanged image. It exists only
during training, and saved weights do not contain it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from image_diffusion.nn.linear import Linear

AUGMENTATION = "augmentation"
"""Name of the map in the network during training."""


@runtime_checkable
class TakesAugmentation(Protocol):
    """A network that takes the labels of an augmentation as `augment`."""

    @property
    def condition_width(self) -> int:
        """Return the number of channels of the embedding that the map is added to."""
        ...


class ZeroLinear(Linear):
    """A linear map that is initialised with zeros, without drawing random numbers."""

    def reset_parameters(self) -> None:
        """Set weights and bias to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def add_augmentation(network: nn.Module, num_labels: int) -> None:
    """Add the map of augmentation labels to a network, initially without effect. Raises ValueError for a network that
    does not support it.
    """
    if not isinstance(network, TakesAugmentation):
        raise ValueError(
            f"train.augment is set, but the network {type(network).__name__} does not take it as a condition. Leave it "
            "out."
        )
    network.add_module(AUGMENTATION, ZeroLinear(num_labels, network.condition_width, bias=False))


def with_augmentation(network: nn.Module, condition: Tensor, labels: Tensor | None) -> Tensor:
    """Return the condition [B, D] of a network plus the mapped augmentation labels [B, L]; without labels, the
    condition."""
    if labels is None:
        return condition
    added: Tensor = network.get_submodule(AUGMENTATION)(labels.to(condition.dtype))
    return condition + added
