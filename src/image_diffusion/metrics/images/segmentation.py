"""Agreement of images with the requested masks: intersection over union with the masks that a segmenter predicts. The
segmenter is trained here, on real images and their masks, in seconds to a minute on a CPU, reproducibly on the same
machine. Its masks of real held-out images give the floor, which contains its own errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.devices import best_device
from image_diffusion.core.resolution import Size
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.classifier import convolved
from image_diffusion.metrics.features.classifier_training import DetectorTraining, fit

_SIDE = 64
"""Longest side of the segmenter's input, in pixels: larger images and masks are reduced."""
_WIDTHS = (16, 32, 48)
TRAINING = DetectorTraining(epochs=4, least_examples=8_000, most_examples=30_000, stop_accuracy=2)
"""Training of the segmenter."""
_AT_ONCE = 100
MOST_HELD_OUT = 200
"""Held-out images on which each round of the training is tested."""


class MaskedImages(Protocol):
    """Images with one mask each, such as joined shards."""

    @property
    def num_samples(self) -> int: ...

    def gather(self, indices: NDArray[np.int64], /) -> Tensor:
        """Return images by index, uint8 [B, C, H, W]."""
        ...

    def gather_of(self, kind: str, indices: NDArray[np.int64], /) -> Tensor:
        """Return data stored with the images: for the kind "images", masks of label numbers, uint8 [B, 1, H, W]."""
        ...


class Segmenter(nn.Module):
    """Images from 0 to 255 [B, C, H, W] -> maps, and a logit for each label and pixel, [B, labels, H, W]. A U-Net with
    two levels of downsampling and skip connections (Ronneberger et al. 2015)."""

    def __init__(self, channels: int, labels: int) -> None:
        super().__init__()
        fine, middle, coarse = _WIDTHS
        self.fine, self.middle = convolved(channels, fine, 3, 1), convolved(fine, middle, 3, 2)
        self.coarse = nn.Sequential(convolved(middle, coarse, 3, 2), convolved(coarse, coarse, 3, 1))
        self.to_middle = convolved(coarse + middle, middle, 3, 1)
        self.to_fine = convolved(middle + fine, fine, 3, 1)
        self.head = nn.Conv2d(fine, labels, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(images.to(torch.float32) / 127.5 - 1)  # [B, 16, H, W]
        middle = self.middle(fine)  # [B, 32, H / 2, W / 2]
        maps = self.coarse(middle)  # [B, 48, H / 4, W / 4]
        for other, layer in ((middle, self.to_middle), (fine, self.to_fine)):
            maps = layer(torch.cat([F.interpolate(maps, other.shape[2:], mode="nearest"), other], dim=1))
        return maps, self.head(maps)


@dataclass(frozen=True)
class _Task:
    """Training and held-out images, with the label of each pixel as the answer."""

    train: MaskedImages
    held_out: MaskedImages
    num_labels: int
    seed: int

    @property
    def train_indices(self) -> NDArray[np.int64]:
        return np.arange(self.train.num_samples)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return images and their masks, half of them mirrored; the draw depends only on the seed and the step."""
        draw = np.random.default_rng([self.seed, step])
        images, masks = _reduced(self.train, draw.integers(0, self.train.num_samples, size))
        flip = torch.from_numpy(draw.random(size) < 0.5)
        images[flip], masks[flip] = images[flip].flip(-1), masks[flip].flip(-1)
        return images.to(best_device()), masks.to(best_device())

    def accuracy(self, network: nn.Module) -> float:
        """Return the mean intersection over union on held-out images."""
        network.eval()
        rows = np.arange(min(self.held_out.num_samples, MOST_HELD_OUT))
        images, masks = _reduced(self.held_out, rows)
        return float(intersection_over_union(_labels(network, images), masks, self.num_labels)[0].mean())


def evaluate_masks(
    samples: MaskedImages,
    train: MaskedImages,
    held_out: MaskedImages,
    labels: Sequence[str],
    settings: DetectorTraining = TRAINING,
) -> dict[str, Any]:
    """Return entries of metrics.json by name: "mask_iou", the mean over the labels of an image, then over the images,
    and "mask_iou_LABEL" for each label, over the images that have or show it; each with the value of held-out images.

    samples: with the requested masks. train, held_out: real images. Raises ValueError without a training image.
    """
    if not train.num_samples:
        raise ValueError("No training image has a mask, so that no segmenter can be trained. Look at pairs.path.")
    task = _Task(train, held_out, len(labels), settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Segmenter(train.gather(np.array([0])).shape[1], len(labels)).to(best_device())
    fit(network, task, settings, "segmenter")
    network.eval()
    of_samples, of_real = (_scores(network, images, len(labels)) for images in (samples, held_out))
    names = ["mask_iou", *(f"mask_iou_{label}" for label in labels)]
    entries: dict[str, Any] = {}
    for name, values, real in zip(names, of_samples.T, of_real.T, strict=True):
        known, floor = values[~values.isnan()], real[~real.isnan()]
        if len(known):
            entries[name] = mean_estimate(known, 0, 1).as_dict()
            if len(floor):
                entries[name] |= {"floor": float(floor.mean()), "floor_n": len(floor)}
    return entries


def training_s(channels: int, num_labels: int, size: Size) -> float:
    """Return the seconds per example of the segmenter's training on this machine. size: of the images."""
    shrunk = _shrunk(size)
    images = torch.zeros(TRAINING.batch_size, channels, *shrunk, device=best_device())
    answers = torch.zeros(TRAINING.batch_size, *shrunk, dtype=torch.int64, device=best_device())
    with torch.random.fork_rng(devices=[]):
        network = Segmenter(channels, num_labels).to(best_device())
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        loss = F.cross_entropy(network(images)[1], answers)
        loss.backward()
        loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return min(seconds) / TRAINING.batch_size


def intersection_over_union(shown: Tensor, asked: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return the intersection over union of masks [B, H, W], float64: the mean over the labels in either, [B], and the
    value of each label, [B, labels], nan if neither contains it."""
    labels = torch.arange(num_labels, device=shown.device).view(-1, 1, 1)
    in_shown, in_asked = shown[:, None] == labels, asked[:, None] == labels  # [B, labels, H, W]
    union = (in_shown | in_asked).sum((2, 3)).double()
    of_each = (in_shown & in_asked).sum((2, 3)) / union  # 0 / 0 is nan
    return of_each.nanmean(1), of_each


def _scores(network: nn.Module, images: MaskedImages, num_labels: int) -> Tensor:
    """Return the mean over the labels and the intersection over union of each label, float64 [N, 1 + labels]."""
    scores = []
    for start in range(0, images.num_samples, _AT_ONCE):
        pixels, masks = _reduced(images, np.arange(start, min(start + _AT_ONCE, images.num_samples)))
        mean, of_each = intersection_over_union(_labels(network, pixels), masks, num_labels)
        scores.append(torch.cat([mean[:, None], of_each], dim=1))
    return torch.cat(scores)


@torch.inference_mode()
def _labels(network: nn.Module, images: Tensor) -> Tensor:
    """Return the most probable label of each pixel, int64 [B, H, W], on the CPU."""
    labels: Tensor = network(images.to(best_device()))[1].argmax(1).cpu()
    return labels


def _shrunk(size: Size) -> Size:
    """Return the height and width of the segmenter's input for images of this size."""
    height, width = (max(1, side * _SIDE // max(_SIDE, *size)) for side in size)
    return height, width


def _reduced(images: MaskedImages, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return images, float32 from 0 to 255 [B, C, h, w], and their masks, int64 [B, h, w], in the size of the
    segmenter's input."""
    pixels, masks = images.gather(rows).float(), images.gather_of("images", rows)
    height, width = pixels.shape[2:]
    size = _shrunk((height, width))
    if size != (height, width):
        pixels = F.interpolate(pixels, size, mode="area")
        masks = F.interpolate(masks, size, mode="nearest-exact")
    return pixels, masks[:, 0].long()
