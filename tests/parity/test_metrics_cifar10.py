"""On real photographs: the embedded detector's distances rise with blur, with noise, with lost classes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.detector import InPipeDetector, load_detector
from image_diffusion.metrics.detector_training import DetectorTraining, train_detector
from image_diffusion.metrics.features import detect
from image_diffusion.metrics.intervals import Estimate
from image_diffusion.metrics.panel import Reference, measure
from image_diffusion.metrics.samples import Samples

DATA = (
    Path(os.environ.get("IMAGE_DIFFUSION_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    / "cifar10-20k.tar"
)
PER_CLASS = 500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_file(), reason=f"CIFAR-10 is not at {DATA}; set IMAGE_DIFFUSION_DATA to its folder"),
]


@pytest.fixture(scope="module")
def sets() -> tuple[Samples, Samples, Samples]:
    """3800 images the detector learns from, 600 of reference, 600 to degrade."""
    images: dict[str, list[np.ndarray]] = {}
    with tarfile.open(DATA) as tar:
        for member in tar:
            name = Path(member.name).parent.name
            if member.isfile() and len(images.setdefault(name, [])) < PER_CLASS:
                with Image.open(io.BytesIO(tar.extractfile(member).read())) as picture:
                    images[name].append(np.asarray(picture.convert("RGB")))
    classes = sorted(images)
    pixels = np.stack([each for name in classes for each in images[name]])
    labels = np.repeat(np.arange(len(classes)), PER_CLASS)
    order = np.random.default_rng(0).permutation(len(pixels))
    parts = (order[:3800], order[3800:4400], order[4400:])
    return tuple(Samples(pixels[part], labels[part], classes) for part in parts)


@pytest.fixture(scope="module")
def judge(sets: tuple[Samples, Samples, Samples], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Estimate]:
    train, reference, _ = sets
    folder = tmp_path_factory.mktemp("detector")
    train_detector(train, reference, DetectorTraining(least_examples=11_000, epochs=1), folder)
    detector: InPipeDetector = load_detector(folder)
    real = Reference.of(detect(detector, reference, 256), torch.from_numpy(reference.labels))

    def metric(images: Tensor, labels: np.ndarray, name: str) -> float:
        made = Samples(images.permute(0, 2, 3, 1).numpy(), labels, reference.classes)
        seen = detect(detector, made, 256)
        settings = EvaluateConfig(two_sample=False)
        return measure(seen, torch.from_numpy(labels), real, detector.classes, settings)[name].value

    return metric


def blurred(images: Tensor, sigma: float) -> Tensor:
    taps = torch.exp(-torch.arange(-4, 5).float().square() / (2 * sigma**2))
    kernel = (taps / taps.sum()).expand(3, 1, 9)
    x = F.pad(images.float(), (4, 4, 4, 4), mode="reflect")
    x = F.conv2d(F.conv2d(x, kernel.unsqueeze(2), groups=3), kernel.unsqueeze(3), groups=3)
    return x.round().clamp(0, 255).byte()


def noisy(images: Tensor, sigma: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)) * sigma
    return (images.float() + noise).round().clamp(0, 255).byte()


@pytest.mark.parametrize("name", ["fd", "kd"])
def test_distances_rise_with_blur_noise_and_lost_classes(
    sets: tuple[Samples, Samples, Samples], judge: Callable[..., float], name: str
):
    held_out = sets[2]
    images, labels = held_out.gather(np.arange(held_out.num_samples)), held_out.labels
    clean = judge(images, labels, name)
    blur = [judge(blurred(images, sigma), labels, name) for sigma in (0.6, 0.9, 1.4)]
    noise = [judge(noisy(images, sigma), labels, name) for sigma in (10, 20, 40)]
    dropped = []
    for most in (6, 4, 2):
        kept = np.flatnonzero(labels < most)
        again = np.resize(kept, len(labels))
        dropped.append(judge(images[torch.from_numpy(again)], labels[again], name))
    for levels in (blur, noise):
        assert [clean, *levels] == sorted([clean, *levels]), levels
        assert levels[-1] > 2 * abs(clean)
    # A detector of a few seconds (half of the images right) sees that classes are lost, not always how many.
    assert min(dropped) > 2 * abs(clean) and dropped[-1] == max(dropped)


def test_labels_that_are_wrong_are_seen_by_the_class_metrics_alone(
    sets: tuple[Samples, Samples, Samples], judge: Callable[..., float]
):
    held_out = sets[2]
    images, labels = held_out.gather(np.arange(held_out.num_samples)), held_out.labels
    swapped = np.roll(labels, 1)
    assert judge(images, swapped, "fd") == pytest.approx(judge(images, labels, "fd"), rel=1e-6)
    assert judge(images, swapped, "class_fd") > judge(images, labels, "class_fd")
    assert judge(images, swapped, "agreement") < 0.5 * judge(images, labels, "agreement")
