"""Labels: dropping during training, and selection for samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from image_diffusion.core.classes import Position, class_number
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.stages.sample import short_changes
from image_diffusion.systems.diffusion.generator import requested_labels

SPEC = DataSpec(channels=1, resolution=4, num_classes=3)


class Notes(nn.Module):
    """Records the labels it receives."""

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
def test_validation_drops_no_labels(objective: Any) -> None:
    ids = torch.arange(100)
    batch = Batch(torch.zeros(100, 1, 4, 4), {"label": ids % 3}, Streams(0, torch.zeros_like(ids), ids))
    network = Notes()
    objective(network.train(), batch)
    assert 30 < int((network.label == 3).sum()) < 70
    objective(network.eval(), batch)
    assert torch.equal(network.label, ids % 3)


def test_random_labels_depend_on_the_shared_seed() -> None:
    seeds, classes = torch.arange(200), ["a", "b", "c"]
    first, again, other = (requested_labels("random", classes, seeds, seed) for seed in (0, 0, 1))
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again) and 80 < int((first != other).sum()) < 180


NUMBERS = sorted(map(str, range(12)))  # sorted like folders: 0, 1, 10, 11, 2, …


@pytest.mark.parametrize(
    ("classes", "label", "name"),
    [
        (NUMBERS, 2, "2"),
        (NUMBERS, "2", "2"),
        (NUMBERS, Position(position=2), "10"),
        (["ant", "bee", "cow"], 2, "cow"),
        (["2", "bee", "cow"], 2, "2"),
        (["2", "bee", "cow"], 1, "bee"),
        (["001", "007"], 7, "007"),
        (["3", "5"], 5, "5"),
    ],
)
def test_numbers_select_classes_by_name_or_position(classes: list[str], label: Any, name: str) -> None:
    assert classes[class_number("sample.labels", label, classes)] == name
    found = requested_labels([label], classes, torch.arange(1))
    assert found is not None and classes[int(found)] == name


@pytest.mark.parametrize("label", [0, 12, "x", Position(position=2)])
def test_numbers_that_are_not_classes_are_rejected(label: Any) -> None:
    with pytest.raises(ValueError, match=r"sample.labels names the class .*, but the classes are 0 to 1: 3, 5"):
        class_number("sample.labels", label, ["3", "5"])


def test_ambiguous_class_numbers_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        class_number("preview.labels", 2, NUMBERS)
        class_number("preview.labels", 1, NUMBERS)
    assert capsys.readouterr().err.splitlines() == [
        "preview.labels: 2 means the class named 2. Write {position: 2} for the class at position 2, 10."
    ]


@pytest.mark.parametrize(
    ("text", "classes", "value"),
    [
        ("2", NUMBERS, "2"),
        ("ant", ["ant"], '"ant"'),
        ("007", ["007"], '"007"'),
        ("{position: 2}", NUMBERS, "{position: 2}"),
        ("{position: 2}", ["{position: 2}"], '"{position: 2}"'),
    ],
)
def test_class_labels_on_the_command_line(text: str, classes: list[str], value: str) -> None:
    assert short_changes({"labels": [text]}, classes) == [f"sample.labels=[{value}]"]


def test_classes_without_training_images_are_sampled_only_by_name() -> None:
    seeds, classes = torch.arange(100), ["a", "b", "c"]
    for labels in ("balanced", "random"):
        found = requested_labels(labels, classes, seeds, untrained=["b"])
        assert found is not None and found.unique().tolist() == [0, 2]
    named = requested_labels(["b"], classes, seeds[:1], untrained=["b"])
    assert named is not None and named.tolist() == [1]
