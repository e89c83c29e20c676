"""Pictures of an evaluation: confusion matrix, images of each class, nearest training images, curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.pictures import as_pictures, image_grid, new_figure, save_figure, save_picture
from image_diffusion.metrics.features.base import ImageSet
from image_diffusion.metrics.images.memorization import Copies

_MOST_CLASSES = 100


def plot_confusion(counts: Tensor, classes: Sequence[str], path: Path) -> None:
    """Plot the share of each requested class (rows) that was recognised as each class (columns). counts: int64 [K,
    K]."""
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    size = min(12.0, 3 + 0.3 * len(classes))
    figure = new_figure(size, size)
    axis = figure.subplots()
    shown = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    if len(classes) <= _MOST_CLASSES:
        axis.set_xticks(range(len(classes)), classes, rotation=90)
        axis.set_yticks(range(len(classes)), classes)
    axis.set_xlabel("recognised")
    axis.set_ylabel("asked for")
    figure.colorbar(shown, ax=axis, shrink=0.8)
    save_figure(figure, path)


def plot_classes(samples: ImageSet, path: Path, columns: int = 10) -> None:
    """Plot the first samples of each class, uncurated, one row per class."""
    labels = np.unique(samples.labels)[:_MOST_CLASSES]
    chosen = [np.flatnonzero(samples.labels == label)[:columns] for label in labels]
    rows = np.sort(np.concatenate(chosen))
    images = as_pictures(samples.gather(rows))
    shown = torch.full((len(labels), columns, *images.shape[1:]), 255, dtype=torch.uint8)
    for line, members in zip(shown, chosen, strict=True):
        line[: len(members)] = images[torch.from_numpy(np.searchsorted(rows, members))]
    save_picture(image_grid(shown.flatten(0, 1), columns), path)


def plot_copies(samples: ImageSet, train: ImageSet, copies: Copies, path: Path, rows: int = 10) -> None:
    """Plot the most suspicious samples, each followed by its nearest training images, nearest first."""
    worst = copies.distance.argsort()[:rows]
    images = [
        torch.cat([samples.gather(np.array([row])), train.gather(copies.nearest[row].numpy())])
        for row in worst.tolist()
    ]
    save_picture(image_grid(torch.cat(images), len(images[0])), path)
