"""On real photographs, the built-in detector's distances rise with blur, noise and lost classes, and fall during
training.

Needs cifar10-20k.tar: 2,000 pictures of each class of CIFAR-10, in a folder a class (`make test-photographs`).
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import to_yaml
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.metrics.compute import Reference, measure
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.set_distances import frechet_between, kernel_distance
from image_diffusion.metrics.features.base import Detected, detect
from image_diffusion.metrics.features.classifier import InPipeDetector, load_detector
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.metrics.samples import Samples, read_samples
from image_diffusion.stages import ema, sample
from image_diffusion.stages import train as train_command

PER_CLASS, CANDIDATES = 900, 800

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sets(photographs: Callable[[str], Path]) -> tuple[Samples, Samples, Samples]:
    """Of each class 300 images to train the detector on, 200 of reference, 400 held out."""
    images: dict[str, list[np.ndarray]] = {}
    with tarfile.open(photographs("cifar10-20k.tar")) as tar:
        for member in tar:
            name = Path(member.name).parent.name
            if member.isfile() and len(images.setdefault(name, [])) < PER_CLASS:
                with Image.open(io.BytesIO(tar.extractfile(member).read())) as picture:
                    images[name].append(np.asarray(picture.convert("RGB")))
    classes = sorted(images)
    rng = np.random.default_rng(0)
    parts = []
    for rows in (slice(0, 300), slice(300, 500), slice(500, 900)):
        pixels = np.stack([each for name in classes for each in images[name][rows]])
        labels = np.repeat(np.arange(len(classes)), rows.stop - rows.start)
        order = rng.permutation(len(labels))
        parts.append(Samples(pixels[order], labels[order], classes, digest=f"rows {rows.start}"))
    return tuple(parts)


@pytest.fixture(scope="module")
def detector(sets: tuple[Samples, Samples, Samples], tmp_path_factory: pytest.TempPathFactory) -> InPipeDetector:
    folder = tmp_path_factory.mktemp("detector")
    train_detector(sets[0], sets[1], DetectorTraining(least_examples=12_000, epochs=1), folder)
    return load_detector(folder)


@pytest.fixture(scope="module")
def real(sets: tuple[Samples, Samples, Samples], detector: InPipeDetector) -> tuple[Detected, Detected]:
    """Features of the reference and of all held-out images."""
    return detect(detector, sets[1]), detect(detector, sets[2])


DISTANCES = {
    "fd": lambda seen, reference: frechet_between(seen.features, reference.features),
    "kd": lambda seen, reference: kernel_distance(seen.features, reference.features),
}


@pytest.fixture(scope="module")
def look(detector: InPipeDetector) -> Callable[[Tensor], Detected]:
    """Returns the features of uint8 images [N, C, H, W]."""
    return lambda images: Detected.join([detector(part) for part in images.split(256)])


def blurred(images: Tensor, sigma: float) -> Tensor:
    taps = torch.exp(-torch.arange(-4, 5).float().square() / (2 * sigma**2))
    kernel = (taps / taps.sum()).expand(3, 1, 9)
    x = F.pad(images.float(), (4, 4, 4, 4), mode="reflect")
    x = F.conv2d(F.conv2d(x, kernel.unsqueeze(2), groups=3), kernel.unsqueeze(3), groups=3)
    return x.round().clamp(0, 255).byte()


def noisy(images: Tensor, sigma: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)) * sigma
    return (images.float() + noise).round().clamp(0, 255).byte()


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_rise_with_blur_and_noise(
    sets: tuple[Samples, Samples, Samples], look: Callable[..., Detected], real: tuple[Detected, Detected], name: str
):
    images = sets[2].gather(np.arange(CANDIDATES))
    clean = DISTANCES[name](look(images), real[0]).value
    for change, sizes in ((blurred, (0.6, 0.9, 1.4)), (noisy, (10, 20, 40))):
        found = [DISTANCES[name](look(change(images, size)), real[0]).value for size in sizes]
        assert [clean, *found] == sorted([clean, *found]), found
        assert found[-1] > 2 * abs(clean)


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_rise_with_every_two_lost_classes(
    sets: tuple[Samples, Samples, Samples], real: tuple[Detected, Detected], name: str
):
    """The mean over eight orders of removing classes: 800 images of 10, 8, 6, 4 and 2 classes, none of them twice.

    In one order alone the distance may fall: without ship and truck a quarter of the images are vehicles instead of
    four in ten, and without frog and horse as well it is a third again, which is nearer to the whole.
    """
    (reference, seen), labels = real, sets[2].labels
    of_class = [np.flatnonzero(labels == number) for number in range(10)]
    orders = [np.random.default_rng(seed).permutation(10) for seed in range(8)]
    means = []
    for kept in (10, 8, 6, 4, 2):
        found = []
        for order in orders:
            rows = np.concatenate([of_class[number][: CANDIDATES // kept] for number in order[:kept]])
            found.append(DISTANCES[name](seen.take(torch.from_numpy(rows)), reference).value)
        means.append(float(np.mean(found)))
    assert means == sorted(means) and len(set(means)) == 5, means
    assert means[1] > 1.2 * means[0], means
    assert min(means[2:]) > 2 * abs(means[0]), means


def test_wrong_labels_change_class_metrics_only(
    sets: tuple[Samples, Samples, Samples], real: tuple[Detected, Detected], detector: InPipeDetector
):
    reference = Reference.from_images(real[0], torch.from_numpy(sets[1].labels))
    rows = torch.arange(CANDIDATES)
    labels = torch.from_numpy(sets[2].labels)[rows]
    settings = EvaluateConfig(two_sample=False)
    right, wrong = (
        measure(real[1].take(rows), asked, reference, detector.classes, settings) for asked in (labels, labels.roll(1))
    )
    assert wrong["fd"].value == pytest.approx(right["fd"].value, rel=1e-6)
    assert wrong["class_fd"].value > right["class_fd"].value
    assert wrong["agreement"].value < 0.5 * right["agreement"].value


def test_early_checkpoint_is_worse_than_late_one_beyond_intervals(
    sets: tuple[Samples, Samples, Samples],
    real: tuple[Detected, Detected],
    detector: InPipeDetector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A small DiT of photographs, trained, kept and sampled by the commands that users run."""
    train = sets[0]
    for number in range(train.num_samples):
        path = tmp_path / "in" / train.classes[train.labels[number]] / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(train.gather(np.array([number]))[0].permute(1, 2, 0).numpy()).save(path)
    text = {
        "data": {"name": "c", "source": {"type": "folder", "path": str(tmp_path / "in")}, "resolution": 32},
        "system": {
            "type": "dit",
            "network": {"depth": 3, "width": 96, "num_heads": 3, "patch": 4},
            "process": {"type": "discrete", "schedule": {"type": "cosine"}},
            "objective": {"type": "denoising", "prediction": "v"},
        },
        "train": {
            "steps": 300,
            "global_batch": 32,
            "ema": {"type": "exponential", "rates": [0.97]},
            "optimizer": {"type": "adamw", "lr": 2.0e-3},
            "grad_clip": 1.0,
            "grid_every_steps": None,
            "validate_every_steps": None,
            "checkpoint": {"every_steps": 30, "keep_every": 30},
        },
        "sample": {"num_samples": 700, "sampler": {"type": "ddim", "num_steps": 10}, "batch_size": 100},
    }
    (tmp_path / "c.yaml").write_text(to_yaml(text))
    experiment = load_all([tmp_path / "c.yaml"])["c"][1]
    write_stages("c", experiment, tmp_path)
    crop_dataset(experiment.data, tmp_path / "crops")

    def run(command: Any, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        command.main()

    config, final = tmp_path / "c" / "config", tmp_path / "train" / "weights.safetensors"
    run(train_command, "--config", config / "train.yaml", "--data", tmp_path / "crops/manifest.json", "--output", final)
    early = tmp_path / "early" / "weights.safetensors"
    run(ema, "--state", tmp_path / "train/state", "--step", 30, "--weights", final, "--output", early)
    found = []
    for weights in (early, final):
        samples = weights.parent / "samples.npz"
        run(sample, "--config", config / "sample.yaml", "--weights", weights, "--output", samples)
        found.append(detect(detector, read_samples(samples, train.classes)))
    for name, distance in DISTANCES.items():
        early, late = (distance(seen, real[0]).interval for seen in found)
        assert early[0] > late[1], (name, early, late)
