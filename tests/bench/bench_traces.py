"""Whether samples show the augmentation of their training: the share of them that is upside down.

    python tests/bench/bench_traces.py [--judges 5] CROPS samples.npz ...

CROPS is a folder of crops with an up and a down, such as results/datasets/cifar10-32/crops, with images held out: the
more images, the better the judge. Classifiers learn to tell these crops from the same upside down. Prints the share of
pictures that they call upside down, mean over the classifiers, with an interval of 95 % over the pictures: of the
held-out crops, of the same crops as a training with `augment: {}` reads them, which is what samples would show if all
of it leaked, and of each file of samples. One classifier differs from another by several hundredths of held-out crops.
A training with `augment: {}` turns about one image in nine upside down. Other traces, such as the blur of a resampling,
are not looked for: a small network blurs, too. Classifiers are wrong more often about samples of a small network than
about real images: compare those of a training with augmentation with those of one without.
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


def augmented(images: Tensor) -> Tensor:
    """Return uint8 images [B, C, H, W] as a training with `augment: {}` reads them, but not mirrored."""
    augment, count = Augment(), len(images)
    draws = augment.draw(Streams(0, torch.zeros(count, dtype=torch.int64), torch.arange(count)), 0.0)
    pixels = augment.apply(images.float() / 127.5 - 1, draws)
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class UpsideDown:
    """Crops, half of them upside down, labelled by that."""

    def __init__(self, train: NDArray[np.uint8], held_out: NDArray[np.uint8], judge: int) -> None:
        self.judge = judge
        self.train_indices = np.arange(len(train))
        self.train, self.held_out = torch.from_numpy(train), torch.from_numpy(held_out)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([self.judge, step])
        images = self.train[generator.integers(0, len(self.train), size)]
        answers = torch.from_numpy(generator.integers(0, 2, size))
        images[answers == 1] = images[answers == 1].flip(2)
        mirrored = torch.from_numpy(generator.random(size) < 0.5)
        images[mirrored] = images[mirrored].flip(3)
        return images, answers

    def accuracy(self, network: nn.Module) -> float:
        right = 1 - called(network, self.held_out).mean() + called(network, self.held_out.flip(2)).mean()
        return float(right) / 2


@torch.no_grad()
def called(network: nn.Module, images: Tensor) -> NDArray[np.bool_]:
    """Return for each image whether the classifier calls it upside down."""
    network.eval()
    parts = [network(part)[1].argmax(1) == 1 for part in images.split(500)]
    network.train()
    return torch.cat(parts).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crops", type=Path, help="folder of crops with images held out")
    parser.add_argument("samples", type=Path, nargs="*", help="samples.npz of trainings on such images")
    parser.add_argument("--judges", type=int, default=5, help="classifiers (5)")
    arguments = parser.parse_args()
    parts = [open_shards(arguments.crops, part) for part in ("train", "validation")]
    train, held_out = (part.gather(np.arange(part.num_samples)).numpy() for part in parts)
    rows = {"held-out crops": torch.from_numpy(held_out)}
    rows["augmented as in training"] = augmented(rows["held-out crops"])
    for path in arguments.samples:
        rows[str(path)] = torch.from_numpy(np.load(path)["arr_0"]).permute(0, 3, 1, 2)
    answers = {name: np.zeros(len(images)) for name, images in rows.items()}
    for judge in range(arguments.judges):
        torch.manual_seed(judge)
        network, task = Classifier(train.shape[1], 2, max(train.shape[2:])), UpsideDown(train, held_out, judge)
        accuracy, _ = fit(network, task, SETTINGS, f"traces: judge {judge}")
        print(f"judge {judge}: {accuracy:.1%} of {2 * len(held_out):,} held-out crops right, half of them upside down")
        for name, images in rows.items():
            answers[name] += called(network, images) / arguments.judges
    print("| Pictures | Number | Called upside down | 95 % interval |\n| --- | ---: | ---: | ---: |")
    for name, shares in answers.items():
        interval = mean_estimate(torch.from_numpy(shares), 0, 1).interval or (0.0, 1.0)  # too few pictures
        print(f"| {name} | {len(shares):,} | {shares.mean():.1%} | {interval[0]:.1%} to {interval[1]:.1%} |")


if __name__ == "__main__":
    main()
