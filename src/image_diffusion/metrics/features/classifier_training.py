"""Training of the built-in detector: it takes seconds to minutes and is reproducible bit for bit on the same machine.
With classes it learns to classify them. Without classes it learns to predict the rotation of an image (Gidaris et al.
2018, "Unsupervised representation learning by predicting image rotations"): a task that needs no labels, only images
with an up and a down. Its description then contains `labels: rotation`, and no metrics of classes are reported.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import sha256_file, write_bytes, write_json
from image_diffusion.core.process.progress import Progress
from image_diffusion.metrics.features.base import ImageSet
from image_diffusion.metrics.features.classifier import FORMAT, Classifier

_ROTATIONS = 4
_MOST_HELD_OUT = 5000


class DetectorTraining(Config):
    """Settings of the training of the embedded detector."""

    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the order and the shifts."""
    epochs: float = Field(4, gt=0)
    """Passes over the training images, within the limits below."""
    least_examples: int = Field(6_000, gt=0)
    """Minimum number of training examples, for small data sets."""
    most_examples: int = Field(200_000, gt=0)
    """Maximum number of training examples: about ten minutes on two CPU cores."""
    batch_size: int = Field(64, gt=0)
    """Images per step."""
    learning_rate: float = Field(0.002, gt=0)
    """Highest learning rate; it rises over the first 30 % and falls to zero (one cycle)."""
    stop_accuracy: float = Field(0.99, gt=0)
    """Accuracy at which training stops early: the share of held-out images that are recognised; above 1: never."""


def train_detector(
    train: ImageSet, held_out: ImageSet | None, settings: DetectorTraining, folder: Path, device: str = "cpu"
) -> dict[str, Any]:
    """Train a detector, write detector.safetensors and detector.json into a folder, and return its description.

    held_out: the images for the accuracy; None or empty: a tenth of `train` is held out. The weights are those of the
    round (an eighth of the training) with the highest held-out accuracy. Raises ValueError for fewer than 10 training
    images, samples that are not images, and weights that are not finite.
    """
    if len(train.shape) != 3:
        raise ValueError(f"The detector is trained on crops [C, H, W]; got samples of shape {list(train.shape)}.")
    if train.num_samples < 10:
        raise ValueError(f"The detector needs at least 10 training images; got {train.num_samples}.")
    task = _Task(train, held_out, settings.seed, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Classifier(train.shape[0], task.num_outputs, max(train.shape[1:])).to(device)
    accuracy, examples_seen = fit(network, task, settings, "detector")
    weights = {name: value.cpu().contiguous() for name, value in network.state_dict().items()}
    write_bytes(folder / "detector.safetensors", save(weights))
    description = {
        "format": FORMAT,
        "labels": task.labels,
        "classes": list(train.classes) if task.labels == "classes" else [],
        "accuracy": round(accuracy, 6),
        "num_held_out": len(task.held_out_indices),
        "chance": round(task.chance, 6),
        "examples_seen": examples_seen,
        "channels": train.shape[0],
        "resolution": max(train.shape[1:]),
        "num_outputs": task.num_outputs,
        "data": train.digest,
        "training": settings.model_dump(mode="json"),
        "sha256": sha256_file(folder / "detector.safetensors"),
    }
    write_json(folder / "detector.json", description)
    return description


class Task(Protocol):
    """Images with one answer each, or one for each pixel. train_indices: indices of the training images."""

    @property
    def train_indices(self) -> NDArray[np.int64]: ...

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the images [B, C, H, W] of a step and their answers [B, …]."""
        ...

    def accuracy(self, network: nn.Module) -> float:
        """Return the score of a network on the held-out images, at most 1."""
        ...


def fit(network: nn.Module, task: Task, settings: DetectorTraining, title: str) -> tuple[float, int]:
    """Train in place and load the weights of the best round. Returns its held-out accuracy and the number of examples.

    network: images -> features, and logits [B, K, …]. title: of the progress bar.
    """
    examples = max(settings.least_examples, settings.epochs * len(task.train_indices))
    examples = round(min(settings.most_examples, examples))
    steps = max(8, math.ceil(examples / settings.batch_size))
    round_steps = math.ceil(steps / 8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    best, weights = -1.0, network.state_dict()
    with Progress(title, steps * settings.batch_size, "image") as progress:
        for step in range(steps):
            network.train()
            images, targets = task.batch(step, settings.batch_size)
            loss = F.cross_entropy(network(images)[1], targets, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            if (step + 1) % round_steps == 0 or step + 1 == steps:
                accuracy = task.accuracy(network)
                if accuracy > best:
                    # copied, because state_dict returns the tensors that the next steps change in place
                    best, weights = accuracy, {name: value.clone() for name, value in network.state_dict().items()}
                if best >= settings.stop_accuracy:
                    break
            progress.advance(len(targets), note=f"held-out accuracy {max(best, 0):.3f}")
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise ValueError(f"The {title}'s weights are not finite. Lower learning_rate.")
    network.load_state_dict(weights)
    return best, (step + 1) * settings.batch_size


class _Task:
    """Training images with their targets, and the held-out images."""

    def __init__(self, train: ImageSet, held_out: ImageSet | None, seed: int, device: str) -> None:
        self._seed, self._device = seed, device
        order = np.random.default_rng([seed, 0]).permutation(train.num_samples)
        self._train = train
        if held_out is not None and held_out.num_samples > 0:
            self._held_out, self.held_out_indices = held_out, np.arange(held_out.num_samples)
            self.train_indices = order
        else:
            kept_back = max(1, train.num_samples // 10)
            self._held_out, self.held_out_indices = train, np.sort(order[:kept_back])
            self.train_indices = order[kept_back:]
        if len(self.held_out_indices) > _MOST_HELD_OUT:
            chosen = np.random.default_rng([seed, 1]).permutation(self.held_out_indices)[:_MOST_HELD_OUT]
            self.held_out_indices = np.sort(chosen)
        self.labels = "classes" if len(train.classes) > 1 else "rotation"
        self.num_outputs = len(train.classes) if self.labels == "classes" else _ROTATIONS

    @property
    def chance(self) -> float:
        """Return the accuracy on the held-out images of always giving the most common answer."""
        if self.labels == "rotation":
            return 1 / _ROTATIONS
        counts = np.bincount(self._held_out.labels[self.held_out_indices])
        return float(counts.max() / counts.sum())

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return images [B, C, H, W], shifted by up to a sixteenth of their size, and their targets [B]."""
        epochs, places = np.divmod(np.arange(step * size, (step + 1) * size), len(self.train_indices))
        parts = []
        for epoch in np.unique(epochs).tolist():
            order = np.random.default_rng([self._seed, 3, epoch]).permutation(self.train_indices)
            parts.append(order[places[epochs == epoch]])
        indices = np.concatenate(parts)
        # one generator per step, so that the shifts of a batch depend only on the seed and the step
        return self._ask(self._train, indices, np.random.default_rng([self._seed, 2, step]))

    def accuracy(self, network: nn.Module) -> float:
        """Return the share of held-out images that are answered correctly."""
        network.eval()
        right = 0
        with torch.inference_mode():
            parts = np.array_split(self.held_out_indices, max(1, len(self.held_out_indices) // 256))
            for number, indices in enumerate(parts):
                images, targets = self._ask(self._held_out, indices, np.random.default_rng([self._seed, 4, number]), 0)
                right += int((network(images)[1].argmax(dim=1) == targets).sum())
        return right / len(self.held_out_indices)

    def _ask(
        self, images: ImageSet, indices: NDArray[np.int64], rng: np.random.Generator, shift: int | None = None
    ) -> tuple[Tensor, Tensor]:
        pixels = images.gather(indices)
        reach = min(pixels.shape[2:]) // 16 if shift is None else shift
        pixels = shifted(pixels, torch.from_numpy(rng.integers(-reach, reach + 1, (2, len(indices)))))
        if self.labels == "classes":
            targets = torch.from_numpy(images.labels[indices])
        else:
            targets = torch.from_numpy(rng.integers(0, _ROTATIONS, len(indices)))
            if pixels.shape[2] != pixels.shape[3]:  # a rotated rectangle has another shape; the network takes squares
                side = max(pixels.shape[2:])
                pixels = F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)
            for turns in range(1, _ROTATIONS):
                pixels[targets == turns] = torch.rot90(pixels[targets == turns], turns, (2, 3))
        return pixels.to(self._device), targets.to(self._device)


def shifted(images: Tensor, offset: Tensor) -> Tensor:
    """Move each image by its own whole number of pixels down and right (offset: int64 [2, B]), the border mirrored."""
    sides = images.shape[2:]
    rows, columns = (_mirrored(torch.arange(side) - offset[i].unsqueeze(1), side) for i, side in enumerate(sides))
    batch = torch.arange(len(images)).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1]).view(1, -1, 1, 1)
    return images[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _mirrored(index: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - index.abs()).abs()
