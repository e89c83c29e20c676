"""The built-in detector: it learns, training is bit-exact, and features depend on the image alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.files.atomic import write_json
from image_diffusion.metrics.features.base import Detected, detect
from image_diffusion.metrics.features.classifier import Classifier, load_detector
from image_diffusion.metrics.features.classifier_training import DetectorTraining, _Task, shifted, train_detector


class Images:
    """An image set in memory."""

    def __init__(self, images: Tensor, labels: np.ndarray, classes: list[str]) -> None:
        self.images, self.labels, self.classes = images, labels, classes
        self.num_samples, self.shape, self.digest = len(images), tuple(images.shape[1:]), "test"
        self.selection = ""

    def gather(self, indices: np.ndarray) -> Tensor:
        return self.images[torch.from_numpy(indices)]


def digits(size: int = 32) -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) * (255 / 16)
    images = F.interpolate(images, (size, size), mode="bilinear").round().to(torch.uint8).expand(-1, 3, -1, -1)
    names = [str(n) for n in range(10)]
    return Images(images[:1437], labels[:1437], names), Images(images[1437:], labels[1437:], names)


def random_images(count: int, size: int = 32, channels: int = 3, classes: int = 2) -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    return Images(images, np.arange(count) % max(1, classes), [f"c{n}" for n in range(classes)])


SHORT = DetectorTraining(least_examples=200, epochs=0.1, batch_size=16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    train, held_out = digits()
    # Every second held-out digit, shuffled writers: the order of the bundled set is by writer.
    order = np.random.default_rng(0).permutation(1797)
    images, labels = (
        torch.cat([train.images, held_out.images])[order],
        np.concatenate([train.labels, held_out.labels])[order],
    )
    parts = Images(images[:1437], labels[:1437], train.classes), Images(images[1437:], labels[1437:], train.classes)
    train_detector(*parts, DetectorTraining(), folder)
    return folder


def test_digits_are_recognised(trained: Path):
    description = json.loads((trained / "detector.json").read_text())
    assert description["accuracy"] >= 0.98
    assert description["labels"] == "classes" and description["num_held_out"] == 360


def test_detector_features_keep_the_image_order(trained: Path):
    detector = load_detector(trained)
    _, held_out = digits()
    whole = detect(detector, held_out)
    assert whole.features.shape == (360, 128) and whole.logits.shape == (360, 10)
    at_a_time = Detected.join([detector(held_out.images[i : i + 1]) for i in range(50)])
    torch.testing.assert_close(at_a_time.features, whole.features[:50], rtol=1e-5, atol=1e-5)
    fewer = detect(detector, Images(held_out.images[:50], held_out.labels[:50], []))
    assert torch.equal(fewer.features, whole.features[:50]), "the last few are filled up and change nothing"


def test_detector_features_have_no_gradient(trained: Path):
    assert not load_detector(trained)(digits()[1].images[:2]).features.requires_grad


def test_unlearnable_labels_use_all_training_examples(tmp_path: Path):
    description = train_detector(random_images(80, classes=8), None, SHORT, tmp_path)
    assert description["accuracy"] < 0.9 and description["examples_seen"] == 208  # 200 in whole batches of 16


def test_detector_stores_class_names(tmp_path: Path):
    images = random_images(40, classes=4)
    train_detector(images, None, SHORT, tmp_path)
    assert load_detector(tmp_path).classes == images.classes and len(images.classes) == 4


def test_classifier_has_350378_parameters():
    assert sum(each.numel() for each in Classifier(3, 10, 32).parameters()) == 350_378


def test_detector_training_is_bit_exact(tmp_path: Path):
    for name in ("a", "b"):
        train_detector(random_images(40), None, SHORT, tmp_path / name)
    for file in ("detector.safetensors", "detector.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    train_detector(random_images(40), None, SHORT.model_copy(update={"seed": 1}), tmp_path / "c")
    assert (tmp_path / "a/detector.safetensors").read_bytes() != (tmp_path / "c/detector.safetensors").read_bytes()


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (48, 3), (300, 3)])
def test_detector_supports_any_resolution_and_channels(tmp_path: Path, size: int, channels: int):
    images = random_images(12, size, channels)
    train_detector(images, None, SHORT.model_copy(update={"least_examples": 20}), tmp_path)
    detected = detect(load_detector(tmp_path), images)
    assert detected.features.shape == (12, 128)


def test_detector_without_classes_learns_rotations(tmp_path: Path):
    train, held_out = digits()
    unlabelled = [Images(each.images, np.zeros(each.num_samples, np.int64), []) for each in (train, held_out)]
    settings = DetectorTraining(least_examples=3000, epochs=1)
    description = train_detector(*unlabelled, settings, tmp_path)
    assert description["labels"] == "rotation" and description["classes"] == []
    assert description["accuracy"] > 0.45  # chance: 0.25
    assert load_detector(tmp_path).classes == []


def test_rotation_labels_match_the_rotated_images():
    images = random_images(12, classes=0)
    pixels, turns = _Task(images, None, 0, "cpu")._ask(images, np.arange(12), np.random.default_rng(0), 0)
    assert set(turns.tolist()) == {0, 1, 2, 3}
    for before, after, turn in zip(images.images, pixels, turns.tolist(), strict=True):
        assert after.equal(torch.rot90(before, turn, (1, 2)))


def test_convolutions_have_no_bias():
    network = Classifier(3, 10, 32)
    assert not [name for name, each in network.named_modules() if isinstance(each, nn.Conv2d) and each.bias is not None]


def test_shift_moves_pixels_and_mirrors_the_border():
    images = torch.arange(32, dtype=torch.uint8).view(1, 1, 4, 8)[..., :4].expand(2, 1, 4, 4)
    moved = shifted(images, torch.tensor([[1, 0], [0, -2]]))
    assert moved[0, 0].equal(images[0, 0][[1, 0, 1, 2]])
    assert moved[1, 0].equal(images[1, 0][:, [2, 3, 2, 1]])


def test_mistakes_are_told(tmp_path: Path):
    with pytest.raises(ValueError, match="at least 10 training images; got 3"):
        train_detector(random_images(3), None, SHORT, tmp_path)
    with pytest.raises(ValueError, match=r"detector\.json does not exist"):
        load_detector(tmp_path)
    train_detector(random_images(20), None, SHORT, tmp_path)
    with pytest.raises(ValueError, match="1 channels but the detector was trained on 3"):
        load_detector(tmp_path)(random_images(2, channels=1).images)
    description = (tmp_path / "detector.json").read_bytes()
    write_json(tmp_path / "detector.json", json.loads(description) | {"format": 1})
    with pytest.raises(ValueError, match=r"has format 1; this version reads format 2\. Run detect again"):
        load_detector(tmp_path)
    (tmp_path / "detector.json").write_bytes(description)
    (tmp_path / "detector.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is not the file"):
        load_detector(tmp_path)
