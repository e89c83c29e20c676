"""Conditioning of a network on numbers of an image, added to the embedding of time and class.

Each number v in [-1, 1] becomes v and the sines and cosines of some frequencies: the positional encoding of a
coordinate by Mildenhall et al. 2020 ("NeRF", equation 4), whose first sine is monotone over the range. Gorishniy et al.
2022 ("On embeddings for numerical features in tabular deep learning", section 3.3) put such features, a linear map and
a nonlinearity before networks for tabular data. A flag marks numbers that are present: all features of missing numbers,
and of numbers dropped for guidance, are zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from image_diffusion.core.types import NUMBERS, DataSpec
from image_diffusion.nn.linear import Linear

EMBEDDER = "number_embedder"
"""Name of the map in a network."""
FREQUENCIES = 4


class NumberEmbedder(nn.Module):
    """Embedding of numbers, by the features of each number and an MLP of two layers."""

    def __init__(self, num_columns: int, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(num_columns * (2 + 2 * FREQUENCIES), width), nn.SiLU(), Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        """Numbers and flags [B, columns, 2] -> [B, width]."""
        value, exists = numbers.split(1, dim=2)  # [B, C, 1] each
        octaves = torch.arange(FREQUENCIES, device=numbers.device, dtype=numbers.dtype).exp2()
        angle = math.pi / 2 * value * octaves  # [B, C, F]: the first one is monotone over [-1, 1]
        features = torch.cat([torch.ones_like(value), value, angle.sin(), angle.cos()], dim=2)
        embedding: Tensor = self.mlp((features * exists).flatten(1))
        return embedding


def add_numbers(network: nn.Module, spec: DataSpec, width: int) -> None:
    """Add the embedder of numbers to a network, if the data have numbers. width: width of the embedding to which it is
    added."""
    if NUMBERS in spec.conditions:
        network.add_module(EMBEDDER, NumberEmbedder(spec.conditions[NUMBERS][0], width))


def with_numbers(network: nn.Module, condition: Tensor, numbers: Tensor | None) -> Tensor:
    """Return the condition [B, D] of a network plus the embedding of the numbers [B, columns, 2]; without numbers, the
    condition."""
    if numbers is None:
        return condition
    added: Tensor = network.get_submodule(EMBEDDER)(numbers.to(condition.dtype))
    return condition + added
