"""Labels: which are dropped while a network is trained, and which are drawn for samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.systems.diffusion.sampling import requested_labels

SPEC = DataSpec(channels=1, resolution=4, num_classes=3)


class Notes(nn.Module):
    """Notes the labels it is given."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.label = label
        return torch.zeros_like(x)


@pytest.mark.parametrize(
    "objective",
    [
        Denoising(label_drop_probability=0.5).build(Discrete().build(), SPEC),
        FlowMatching(label_drop_probability=0.5).build(Flow().build(), SPEC),
    ],
    ids=["denoising", "flow"],
)
def test_a_validation_drops_no_labels(objective: Any) -> None:
    ids = torch.arange(100)
    batch = Batch(torch.zeros(100, 1, 4, 4), {"label": ids % 3}, Streams(0, torch.zeros_like(ids), ids))
    network = Notes()
    objective(network.train(), batch)
    assert 30 < int((network.label == 3).sum()) < 70
    objective(network.eval(), batch)
    assert torch.equal(network.label, ids % 3)


def test_the_seed_that_all_share_reaches_random_labels() -> None:
    seeds, classes = torch.arange(200), ["a", "b", "c"]
    first, again, other = (requested_labels("random", 200, classes, seeds, seed) for seed in (0, 0, 1))
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again) and 80 < int((first != other).sum()) < 180
