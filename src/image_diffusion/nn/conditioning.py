"""Conditions that are added to the embedding of time and class of a network.

Numbers of an image: each number v in [-1, 1] becomes v and the sines and cosines of some frequencies: the positional
encoding of a coordinate by Mildenhall et al. 2020 ("NeRF", equation 4), whose first sine is monotone over the range.
Gorishniy et al. 2022 ("On embeddings for numerical features in tabular deep learning", section 3.3) put such features,
a linear map and a nonlinearity before networks for tabular data. A flag marks numbers that are present: all features of
missing numbers, and of numbers dropped for guidance, are zeros.

Augmentation of training images: a linear map of its labels (Karras et al. 2022, arXiv:2206.00364, appendix F.2). The
map has no bias, so that omitting it is equivalent to labels of zeros, which mean an unchanged image. It exists only
during training, and saved weights do not contain it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from image_diffusion.core.types import NUMBERS, DataSpec
from image_diffusion.nn.linear import Linear

AUGMENTATION = "augmentation"
"""Name of the map of augmentation labels in the network during training."""
_NUMBERS = "number_embedder"
_FREQUENCIES = 4


class NumberEmbedder(nn.Module):
    """Embedding of numbers, by the features of each number and an MLP of two layers."""

    def __init__(self, num_columns: int, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(num_columns * (2 + 2 * _FREQUENCIES), width), nn.SiLU(), Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        """Numbers and flags [B, columns, 2] -> [B, width]."""
        value, exists = numbers.split(1, dim=2)  # [B, C, 1] each
        octaves = torch.arange(_FREQUENCIES, device=numbers.device, dtype=numbers.dtype).exp2()
        angle = math.pi / 2 * value * octaves  # [B, C, F]: the first one is monotone over [-1, 1]
        features = torch.cat([torch.ones_like(value), value, angle.sin(), angle.cos()], dim=2)
        return self.mlp((features * exists).flatten(1))


class ZeroLinear(Linear):
    """A linear map that is initialised with zeros, without drawing random numbers."""

    def reset_parameters(self) -> None:
        """Set weights and bias to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def add_numbers(network: nn.Module, spec: DataSpec, width: int) -> None:
    """Add the embedder of numbers to a network, if the data have numbers. width: of the embedding of time and class."""
    if NUMBERS in spec.conditions:
        network.add_module(_NUMBERS, NumberEmbedder(spec.conditions[NUMBERS][0], width))


def add_augmentation(network: nn.Module, num_labels: int) -> None:
    """Add the map of augmentation labels to a network, initially without effect. The network has the width of its
    embedding as `condition_width`. Raises ValueError for a network that does not support it.
    """
    width = getattr(network, "condition_width", None)
    if width is None:
        raise ValueError(
            f"train.augment is set, but the network {type(network).__name__} does not take it as a condition. Leave it "
            "out."
        )
    network.add_module(AUGMENTATION, ZeroLinear(num_labels, width, bias=False))


def with_added(network: nn.Module, embedding: Tensor, numbers: Tensor | None, augment: Tensor | None) -> Tensor:
    """Return the embedding [B, D] plus those of numbers [B, columns, 2] and augmentation labels [B, L], if given."""
    for name, values in ((_NUMBERS, numbers), (AUGMENTATION, augment)):
        if values is not None:
            embedding = embedding + network.get_submodule(name)(values.to(embedding.dtype))
    return embedding
