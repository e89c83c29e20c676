"""Intersection over union of images and their requested masks, by a segmenter trained for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.metrics.features.classifier_training import DetectorTraining
from image_diffusion.metrics.images.segmentation import Segmenter, evaluate_masks, intersection_over_union

TRAINING = DetectorTraining(least_examples=640, most_examples=640, batch_size=16, stop_accuracy=2)


@dataclass(frozen=True)
class Pictures:
    """Images and their requested masks."""

    images: Tensor
    masks: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.images)

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        return self.images[indices]

    def gather_of(self, kind: str, indices: NDArray[np.int64]) -> Tensor:
        assert kind == "images"
        return self.masks[indices]


def boxes(count: int, seed: int, side: int = 16) -> Pictures:
    """Draw light boxes on a dark, noisy background, with masks of the boxes."""
    draw = np.random.default_rng(seed)
    masks = np.zeros((count, 1, side, side), dtype=np.uint8)
    for mask in masks[:, 0]:
        top, left = draw.integers(0, side // 2, 2)
        mask[top : top + side // 2, left : left + side // 2] = 1
    images = 120 * masks + draw.integers(0, 100, (count, 3, side, side))
    return Pictures(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(masks))


def test_intersection_over_union_matches_manual_counts() -> None:
    shown = torch.tensor([[[0, 0], [1, 1]], [[0, 0], [0, 0]], [[2, 2], [2, 2]]])
    asked = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]])
    mean, of_each = intersection_over_union(shown, asked, 3)
    assert of_each[0, :2].tolist() == [1 / 2, 2 / 3] and of_each[0, 2].isnan()
    assert of_each[1, 0] == 1 and of_each[1, 1:].isnan().all()
    assert mean.tolist() == pytest.approx([(1 / 2 + 2 / 3) / 2, 1, 0])


def test_mask_iou_separates_matching_and_other_masks() -> None:
    train, held_out = boxes(200, 0), boxes(40, 1)
    right = boxes(120, 2)
    wrong = Pictures(right.images, right.masks.flip(-2))
    good, bad = (evaluate_masks(samples, train, held_out, ["ground", "box"], TRAINING) for samples in (right, wrong))
    assert set(good) == {"mask_iou", "mask_iou_ground", "mask_iou_box"}
    assert good["mask_iou"]["value"] > 0.9 and good["mask_iou"]["floor"] > 0.9
    assert good["mask_iou"]["interval"][0] < good["mask_iou"]["value"] <= good["mask_iou"]["interval"][1] <= 1
    assert bad["mask_iou_box"]["value"] < 0.5 and bad["mask_iou_box"]["floor"] == good["mask_iou_box"]["floor"]
    both = (good["mask_iou_ground"]["value"] + good["mask_iou_box"]["value"]) / 2
    assert good["mask_iou"]["value"] == pytest.approx(both) and good["mask_iou"]["floor_n"] == 40


def test_mask_metrics_do_not_depend_on_the_global_random_state() -> None:
    few = DetectorTraining(least_examples=32, most_examples=32, batch_size=4, stop_accuracy=2)
    sets = boxes(20, 2), boxes(30, 0), boxes(10, 1)
    first = evaluate_masks(*sets, ["ground", "box"], few)
    torch.rand(3)
    assert evaluate_masks(*sets, ["ground", "box"], few) == first


def test_absent_mask_labels_are_skipped_and_large_images_are_resized() -> None:
    few = DetectorTraining(least_examples=32, most_examples=32, batch_size=4, stop_accuracy=2)
    made = evaluate_masks(boxes(8, 2, 96), boxes(12, 0, 96), boxes(6, 1, 96), ["ground", "box", "other"], few)
    assert {"mask_iou_ground", "mask_iou_box"} < set(made)
    _, logits = Segmenter(3, 5)(torch.zeros(2, 3, 31, 18))
    assert logits.shape == (2, 5, 31, 18)


def test_training_images_without_masks_are_rejected() -> None:
    nothing = Pictures(torch.zeros(0, 3, 8, 8), torch.zeros(0, 1, 8, 8))
    with pytest.raises(ValueError, match=r"No training image has a mask.* Look at pairs.path"):
        evaluate_masks(boxes(2, 0), nothing, boxes(2, 1), ["a", "b"])
