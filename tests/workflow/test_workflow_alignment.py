"""Workflow from images through features of a teacher to a network aligned with them."""

from __future__ import annotations

import pytest
from projects import Project

from image_diffusion.core.files.weights import read_weights
from image_diffusion.data.shards.reader import open_shards

pytestmark = pytest.mark.slow


def test_features_are_encoded_once_and_used_by_training_only(fresh: Project) -> None:
    def align(data: dict[str, object], weight: float) -> None:
        data["pairs"] = {"type": "features"}
        data["system"] |= {"alignment": {"block": 1, "weight": weight}}  # type: ignore[operator]

    fresh.edit(lambda data: align(data, 0.5))
    fresh.run("results/micro/train/weights.safetensors")
    features = open_shards(fresh / "results/datasets/dots-16/features-inpipe", "all", in_background=True)
    assert features.shape == (192, 4, 4) and features.num_samples == 64
    tensors, model = read_weights(fresh / "results/micro/train")
    assert not any(name.startswith("alignment") for name in tensors) and model["spec"]["features"] == [192, 4, 4]
    fresh.edit(lambda data: align(data, 0.25))
    assert fresh.planned("results/micro/train/weights.safetensors") == {"train"}
