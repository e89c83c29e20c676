"""Networks on the meta device, with shapes only."""

import torch
from torch import nn

from image_diffusion.core.devices import shapes_only
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig


def test_meta_network_has_the_names_and_shapes_of_the_real_one() -> None:
    config = DiTConfig(depth=1, width=32, num_heads=2, patch=4)
    spec = DataSpec(channels=3, resolution=16, num_classes=2)
    with shapes_only():
        shapes = config.build(spec, False).state_dict()
    real = config.build(spec, False).state_dict()
    assert {name: tensor.shape for name, tensor in shapes.items()} == {n: t.shape for n, t in real.items()}
    assert [name for name, tensor in shapes.items() if not tensor.is_meta] == ["pos_embed"]  # a table, not a weight


def test_initialisation_is_normal_outside_shapes_only() -> None:
    with shapes_only():
        assert nn.Embedding(3, 4).weight.is_meta
        assert torch.randn(2, 3).is_meta and torch.randn(2, 3).shape == (2, 3)
    assert nn.Embedding(3, 4).weight.abs().sum() > 0
