"""Utility of synthetic images: classifiers or regressors trained with and without them, and tested on held-out real
images. Each is a small convolutional network, trained from scratch on images reduced to 32 pixels, with the same number
of steps for every training set. The features of the data set's detector are not used: they were fitted to all real
training images, which would help a classifier trained on only a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.devices import best_device
from image_diffusion.core.files.partial_results import Arrays, batches
from image_diffusion.core.process.progress import Progress
from image_diffusion.metrics.compute import fixed_subset
from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.metrics.features.base import ImageSet
from image_diffusion.metrics.features.classifier_training import shifted

MULTIPLES = (1, 2, 4)
"""Numbers of synthetic images for each real one that classifiers are trained on."""
_SIZE, _BATCH = 32, 64
_RATE = 0.003
MOST_IMAGES = 20_000
"""Maximum number of real images for training, and for testing."""
_LEAST_TESTED = 2


@dataclass(frozen=True)
class Labelled:
    """Images with the labels or numbers to recognise. images: uint8 [N, C, 32, 32]. labels: int64 [N], the classes.
    numbers: float32 [N, columns, 2], as `NumberColumns.scaled` returns them; None without numbers."""

    images: Tensor
    labels: Tensor
    numbers: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor | slice) -> Labelled:
        """Return some of the images."""
        numbers = None if self.numbers is None else self.numbers[rows]
        return Labelled(self.images[rows], self.labels[rows], numbers)

    def first(self, count: int) -> Labelled:
        """Return the first images."""
        return self.take(slice(count))

    def __add__(self, other: Labelled) -> Labelled:
        both = self.numbers is not None and other.numbers is not None
        numbers = torch.cat([self.numbers, other.numbers]) if both else None  # type: ignore[list-item]
        return Labelled(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]), numbers)


class Task(Protocol):
    """Recognition task. outputs: number of outputs of the network. bounds: lowest and highest score of an image."""

    @property
    def outputs(self) -> int: ...

    @property
    def bounds(self) -> tuple[float, float]: ...

    def loss(self, answers: Tensor, images: Labelled) -> Tensor:
        """Return the loss of a batch, a scalar. answers: [B, outputs], on the device of the network."""
        ...

    def scores(self, answers: Tensor, images: Labelled) -> Tensor:
        """Return the score of each image, float64 [N], 1 for a perfect answer. answers: [N, outputs]."""
        ...


@dataclass(frozen=True)
class Classification:
    """Recognition of the class. An image scores 1 if its class is recognised, else 0."""

    outputs: int
    bounds: tuple[float, float] = (0.0, 1.0)

    def loss(self, answers: Tensor, images: Labelled) -> Tensor:
        return F.cross_entropy(answers, images.labels.to(answers.device))

    def scores(self, answers: Tensor, images: Labelled) -> Tensor:
        return (answers.argmax(dim=1) == images.labels).to(torch.float64)


@dataclass(frozen=True)
class Regression:
    """Recognition of numbers. The score of an image is 1 minus its squared error divided by the variance of the
    held-out images, as a mean over its numbers; without missing numbers, the mean over images is the explained share of
    the variance (R²).

    variance: of each column of the held-out images, float64 [columns].
    """

    variance: Tensor
    bounds: tuple[float, float] = (-math.inf, 1.0)

    @property
    def outputs(self) -> int:
        return len(self.variance)

    def loss(self, answers: Tensor, images: Labelled) -> Tensor:
        value, exists = self._numbers(images, answers)
        return ((answers - value).square() * exists).sum() / exists.sum().clamp(min=1)

    def scores(self, answers: Tensor, images: Labelled) -> Tensor:
        value, exists = self._numbers(images, answers.to(torch.float64))
        errors = (answers.to(torch.float64) - value).square() / self.variance * exists
        return 1 - errors.sum(dim=1) / exists.sum(dim=1)

    def _numbers(self, images: Labelled, like: Tensor) -> tuple[Tensor, Tensor]:
        assert images.numbers is not None
        value, exists = images.numbers.to(like).unbind(dim=2)
        return value, exists


def regression(held_out: Labelled) -> tuple[Regression, Labelled]:
    """Return the task of recognising the numbers of held-out images, and the images that have all numbers. Raises
    ValueError if fewer than two have them, or a number is the same in all.
    """
    assert held_out.numbers is not None
    complete = held_out.take(held_out.numbers[..., 1].bool().all(dim=1).nonzero().squeeze(1))
    assert complete.numbers is not None
    values = complete.numbers[..., 0].to(torch.float64)
    variance = values.var(dim=0) if len(complete) >= _LEAST_TESTED else torch.zeros(values.shape[1])
    if not bool((variance > 0).all()):
        raise ValueError("too few held-out images have all numbers, or one number is the same in all")
    return Regression(variance), complete


def reduced_set(images: ImageSet, most: int = MOST_IMAGES, numbers: Tensor | None = None) -> Labelled:
    """Return a fixed random subset of at most `most` images, in a random order that is always the same, reduced to 32
    pixels. numbers: of all images, float32 [N, columns, 2]."""
    rows = np.random.default_rng(0).permutation(fixed_subset(images.num_samples, most).numpy())
    parts = [_resized(images.gather(part)) for part in np.array_split(rows, -(-len(rows) // 512))] if len(rows) else []
    pixels = torch.cat(parts) if parts else torch.empty(0, images.shape[0], _SIZE, _SIZE, dtype=torch.uint8)
    chosen = Labelled(pixels, torch.from_numpy(np.asarray(images.labels)[rows]))
    return chosen if numbers is None else replace(chosen, numbers=numbers[torch.from_numpy(rows)])


def _resized(images: Tensor) -> Tensor:
    if images.shape[2:] == (_SIZE, _SIZE):
        return images
    pixels = F.interpolate(images.float(), (_SIZE, _SIZE), mode="bilinear", antialias=True, align_corners=False)
    return pixels.round().clamp(0, 255).to(torch.uint8)


def training_sets(real: Labelled, synthetic: Labelled) -> dict[str, Labelled]:
    """Return the training sets by name: only synthetic images, only real images, and real images with 1, 2 and 4 times
    as many synthetic images if there are enough, or with all of them if they are fewer than the real images."""
    counts = {f"real_and_{k}x": k * len(real) for k in MULTIPLES if k * len(real) <= len(synthetic)}
    counts = counts or {"real_and_all": len(synthetic)}
    return {
        "synthetic": synthetic.first(MULTIPLES[-1] * len(real)),
        "real": real,
        **{name: real + synthetic.first(count) for name, count in counts.items()},
    }


def utility(
    real: Labelled,
    synthetic: Labelled,
    held_out: Labelled,
    task: Task,
    num_seeds: int,
    steps: int,
    num_classes: int = 0,
) -> dict[str, Estimate]:
    """Return the mean scores on held-out images, by training set, and the gains: the score with real images and the
    largest multiple of synthetic ones, minus that with only real images; with classes also `gain_rarest`, over the
    rarest quarter of the classes with real images.

    num_seeds: networks per training set, two or more; steps: of each network. Intervals are over seeds and held-out
    images (`crossed_mean`).
    """
    sets = training_sets(real, synthetic)
    cached, right = batches("utility"), dict[str, Tensor]()
    with Progress("utility", len(sets) * num_seeds, "network") as progress:
        for name, images in sets.items():
            rows = []
            for seed in range(num_seeds):
                answers = cached(f"{name}-{seed}", _answers(images, held_out, task, seed, steps))["right"]
                rows.append(torch.from_numpy(answers.copy()))
                progress.advance(1)
            right[name] = torch.stack(rows)  # [seeds, N]
    gain = right[list(sets)[-1]] - right["real"]
    estimates = {name: crossed_mean(rows, *task.bounds) for name, rows in right.items()}
    low, high = task.bounds[0] - task.bounds[1], task.bounds[1] - task.bounds[0]  # of a difference of two scores
    estimates |= {"gain": crossed_mean(gain, low, high)}
    if num_classes:
        rarest = torch.isin(held_out.labels, rarest_classes(real.labels, num_classes))
        estimates["gain_rarest"] = crossed_mean(gain[:, rarest], low, high)
    return estimates


def _answers(train: Labelled, test: Labelled, task: Task, seed: int, steps: int) -> Callable[[], Arrays]:
    return lambda: {"right": train_and_test(train, test, task, seed, steps).numpy()}


def train_and_test(train: Labelled, test: Labelled, task: Task, seed: int, steps: int) -> Tensor:
    """Train a network for a task; return its score on each test image, float64 [N].

    seed: of its weights, of the order of the images and of their shifts by up to two pixels.
    """
    device, rng = best_device(), np.random.default_rng([seed, 5])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(train.images.shape[1], task.outputs).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(0, len(train), _BATCH))
        pixels = shifted(train.images[rows], torch.from_numpy(rng.integers(-2, 3, (2, _BATCH))))
        loss = task.loss(network(_scaled(pixels).to(device)), train.take(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    with torch.inference_mode():
        answers = [network(_scaled(part).to(device)).cpu() for part in test.images.split(512)]
    return task.scores(torch.cat(answers), test)


def _scaled(images: Tensor) -> Tensor:
    return images.to(torch.float32) / 127.5 - 1


def _network(channels: int, outputs: int) -> nn.Sequential:
    """Build a network of 50,000 parameters: images [B, C, 32, 32] -> [B, outputs]."""
    layers: list[nn.Module] = []
    for wider in (24, 48, 96):
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))


def rarest_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Return the quarter of the classes that have images, at least one, that have the fewest, int64."""
    counts = torch.bincount(labels, minlength=num_classes)
    present = counts.nonzero().squeeze(1)
    return present[counts[present].argsort(stable=True)[: max(1, len(present) // 4)]]


def crossed_mean(values: Tensor, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of values [S, N] of S seeds on the same N images, with an interval over other seeds and images.

    The variance is the sum of that of the mean of each seed and that of the mean of each image, which is not below that
    of the mean of two crossed random effects (Owen 2007, "The pigeonhole bootstrap", section 3), each with its own
    Student's t: three seeds give a poor estimate of their spread. The latter assumes that at least one of the images
    differs by one, since a few equal answers are weak evidence. low, high: bounds of the interval.
    """
    from scipy.special import stdtrit  # here: loading it would slow the start of every stage

    num_seeds, num_images = values.shape
    if num_images < _LEAST_TESTED or num_seeds < 2:
        mean = float(values.mean()) if values.numel() else math.nan
        return Estimate(mean, num_images, note=f"no interval: {num_seeds} seeds on {num_images} held-out images")
    value = float(values.mean())
    over_seeds = float(values.mean(dim=1).var()) / num_seeds
    over_images = max(float(values.mean(dim=0).var()), 1 / num_images) / num_images
    of_seeds, of_images = (float(stdtrit(count - 1, 0.975)) for count in values.shape)
    reach = math.sqrt(of_seeds**2 * over_seeds + of_images**2 * over_images)
    return Estimate(value, num_images, value, (max(low, value - reach), min(high, value + reach)))
