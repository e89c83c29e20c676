"""Whether samples show the augmentation of their training: the share of them that is upside down, or rotated, shifted
and stretched.

    python tests/bench/bench_traces.py [--judges 5] [--augment '{"rotation": 15, ...}'] CROPS samples.npz ...

CROPS is a folder of crops with an up and a down, such as results/datasets/cifar10-32/crops, with images held out: the
more images, the better the judge. Classifiers learn to tell these crops from the same upside down, or with --augment,
the settings of `train.augment`, from the same after all of its operations. Prints the share of pictures that they call
changed, mean over the classifiers, with an interval of 95 % over the pictures: of the held-out crops, of the same crops
as a training with these settings reads them (`augment: {}` by default), which is what samples would show if all of it
leaked, and of each file of samples. One classifier differs from another by several hundredths of held-out crops.
A training with `augment: {}` turns about one image in nine upside down. The blur of a resampling is not looked for,
since a small network blurs, too: with --augment, pictures that are not changed are moved by about 1 % of their side.
Classifiers are wrong more often about samples of a small network than about real images: compare those of a training
with augmentation with those of one without.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from image_diffusion.core.random.streams import Streams
from image_diffusion.data.augment import Augment
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.classifier import Classifier
from image_diffusion.metrics.features.classifier_training import DetectorTraining, fit

SETTINGS = DetectorTraining(epochs=6)


NUDGE = Augment(probability=1, vertical_flip=False, scale=0, rotation=1, anisotropy=0, shift=0.01)
"""Resamples an image with next to no change."""


def after(augment: Augment, images: Tensor, seed: int = 0) -> Tensor:
    """Return uint8 images [B, C, H, W] as a training with an augmentation reads them, but not mirrored."""
    count = len(images)
    draws = augment.draw(Streams(seed, torch.zeros(count, dtype=torch.int64), torch.arange(count)), 0.0)
    pixels = augment.apply(images.float() / 127.5 - 1, draws)
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class Changed:
    """Crops, half of them changed, labelled by that. augment: the change; None: turned upside down."""

    def __init__(
        self, train: NDArray[np.uint8], held_out: NDArray[np.uint8], judge: int, augment: Augment | None
    ) -> None:
        self.judge, self.augment = judge, augment and augment.model_copy(update={"probability": 1.0})
        self.train_indices = np.arange(len(train))
        self.train, self.held_out = torch.from_numpy(train), torch.from_numpy(held_out)

    def plain(self, images: Tensor, seed: int = 0) -> Tensor:
        """Return unchanged pictures as the classifiers see them."""
        return images if self.augment is None else after(NUDGE, images, seed)

    def changed(self, images: Tensor, seed: int = 0) -> Tensor:
        return images.flip(2) if self.augment is None else after(self.augment, images, seed)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([self.judge, step])
        images = self.train[generator.integers(0, len(self.train), size)]
        answers = torch.from_numpy(generator.integers(0, 2, size))
        mirrored = torch.from_numpy(generator.random(size) < 0.5)
        images[mirrored] = images[mirrored].flip(3)
        images[answers == 0] = self.plain(images[answers == 0], step)
        images[answers == 1] = self.changed(images[answers == 1], step)
        return images, answers

    def accuracy(self, network: nn.Module) -> float:
        plain, changed = self.plain(self.held_out), self.changed(self.held_out)
        return float(1 - called(network, plain).mean() + called(network, changed).mean()) / 2


@torch.no_grad()
def called(network: nn.Module, images: Tensor) -> NDArray[np.bool_]:
    """Return for each image whether the classifier calls it changed."""
    network.eval()
    parts = [network(part)[1].argmax(1) == 1 for part in images.split(500)]
    network.train()
    return torch.cat(parts).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crops", type=Path, help="folder of crops with images held out")
    parser.add_argument("samples", type=Path, nargs="*", help="samples.npz of trainings on such images")
    parser.add_argument("--judges", type=int, default=5, help="classifiers (5)")
    parser.add_argument("--augment", type=Augment.model_validate_json, help="settings of train.augment, as JSON")
    arguments = parser.parse_args()
    parts = [open_shards(arguments.crops, part) for part in ("train", "validation")]
    train, held_out = (part.gather(np.arange(part.num_samples)).numpy() for part in parts)
    rows = {"held-out crops": torch.from_numpy(held_out)}
    rows["augmented as in training"] = after(arguments.augment or Augment(), rows["held-out crops"])
    for path in arguments.samples:
        rows[str(path)] = torch.from_numpy(np.load(path)["arr_0"]).permute(0, 3, 1, 2)
    answers = {name: np.zeros(len(images)) for name, images in rows.items()}
    for judge in range(arguments.judges):
        torch.manual_seed(judge)
        network = Classifier(train.shape[1], 2, max(train.shape[2:]))
        task = Changed(train, held_out, judge, arguments.augment)
        accuracy, _ = fit(network, task, SETTINGS, f"traces: judge {judge}")
        print(f"judge {judge}: {accuracy:.1%} of {2 * len(held_out):,} held-out crops right, half of them changed")
        for name, images in rows.items():
            answers[name] += called(network, task.plain(images)) / arguments.judges
    print("| Pictures | Number | Called changed | 95 % interval |\n| --- | ---: | ---: | ---: |")
    for name, shares in answers.items():
        interval = mean_estimate(torch.from_numpy(shares), 0, 1).interval or (0.0, 1.0)  # too few pictures
        print(f"| {name} | {len(shares):,} | {shares.mean():.1%} | {interval[0]:.1%} to {interval[1]:.1%} |")


if __name__ == "__main__":
    main()
