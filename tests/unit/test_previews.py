"""Training previews: a grid, the images themselves, and a picture for each class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from crops import crops_of_twelve
from image_diffusion.core.config.base import to_yaml
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import requested_labels
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task


def prepared(folder: Path, system: Mapping[str, Any] = {}, preview: Mapping[str, Any] = {}) -> tuple[Task, list[str]]:
    """Return a training on twelve images, and its classes."""
    crops = crops_of_twelve(folder)
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
    stage = {
        "experiment": "x",
        "codec": {"type": "rgb"},
        "system": {"type": "dit", "network": network, **system},
        "train": {"steps": 1, "global_batch": 4},
        "preview": {"num_samples": 15, "sampler": {"type": "ddim", "num_steps": 2}, **preview},
    }
    (folder / "train.yaml").write_text(to_yaml(stage))
    training = prepare_training(folder / "train.yaml", crops / "manifest.json", None)
    return training.build(World(0, 1, torch.device("cpu"))), training.model["classes"]


def test_random_classes_of_image_conditioned_previews_follow_the_seeds(tmp_path: Path) -> None:
    condition = [{"type": "label"}, {"type": "image", "from": "self", "shrink": 4}]
    task, classes = prepared(tmp_path, {"condition": condition}, {"labels": "random"})
    assert task.grid is not None
    task.grid(task.network.eval(), 0, tmp_path)
    found = np.load(tmp_path / "step-0000000.npz")["arr_1"]
    expected = requested_labels("random", classes, torch.arange(15))
    assert expected is not None and found.tolist() == expected.tolist()


def test_previews_have_one_picture_per_class_under_a_fixed_key(tmp_path: Path) -> None:
    task, classes = prepared(tmp_path)
    assert task.grid is not None
    first, second = (task.grid(task.network.eval(), step, tmp_path) for step in (0, 200))
    assert list(first) == list(second) == ["preview", *(f"preview/{name}" for name in classes)] and len(classes) == 3
    assert not set(first.values()) & set(second.values())
    images = np.load(tmp_path / "step-0000000.npz")["arr_0"]
    labels = np.load(tmp_path / "step-0000000.npz")["arr_1"]
    for number, name in enumerate(classes):
        with Image.open(str(first[f"preview/{name}"])) as picture:
            shown = np.asarray(picture)
        assert shown.shape == (132, 132, 3), "four images, enlarged to 64 pixels"
        assert np.array_equal(shown[:64:4, :64:4], images[labels == number][0])
