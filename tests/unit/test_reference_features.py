"""Detector features of real images: several detectors in one pass, stored in files, read by later evaluations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from image_diffusion.core.files.atomic import read_json, to_json, write_json
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.base import AT_ONCE, Detected
from image_diffusion.metrics.features.reference_features import (
    read_features,
    read_statistics,
    write_features,
    write_part,
)
from image_diffusion.metrics.samples import Samples

CLASSES = ["dark", "bright"]
NO_COPIES = EvaluateConfig(copies=False)


class Quarters:
    """A detector: mean brightness of an image's quarters, logits of two classes, and spatial features."""

    doubt: str | None = None

    def __init__(self, name: str, classes: list[str]) -> None:
        self.identity: dict[str, Any] = {"name": name, "sha256": f"weights of {name}"}
        self.classes, self.images_seen = classes, 0

    def __call__(self, images: Tensor) -> Detected:
        self.images_seen += len(images)
        pixels = images.float() / 255
        quarters = torch.nn.functional.adaptive_avg_pool2d(pixels, 2).flatten(1)
        level = quarters.mean(dim=1, keepdim=True)
        return Detected(quarters, -(level - torch.tensor([0.3, 0.6])).abs(), pixels.mean(dim=(1, 3)))

    def metric_name(self, metric: str) -> str:
        return f"{self.identity['name']}_{metric}"


class Counted(Samples):
    """Samples that count their reads."""

    reads = 0

    def gather(self, indices: Any) -> Tensor:
        self.reads += 1
        return super().gather(indices)


def images(count: int, seed: int) -> Counted:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    pixels = rng.normal(80 + 80 * labels, 30, (16, 16, 3, count)).transpose(3, 0, 1, 2)
    return Counted(np.clip(pixels, 0, 255).astype(np.uint8), labels, CLASSES, digest=f"set {seed}")


@pytest.fixture
def data() -> RealImages:
    return RealImages(images(300, 0), images(120, 1))


def both() -> list[Quarters]:
    return [Quarters("first", CLASSES), Quarters("second", [])]


def test_several_detectors_evaluate_in_one_pass_under_their_names(data: RealImages) -> None:
    samples = images(130, 2)
    result = evaluate_samples(samples, data, both(), NO_COPIES)
    assert samples.reads == -(-130 // AT_ONCE), "each image is read once for all detectors"
    alone = [evaluate_samples(images(130, 2), data, [each], NO_COPIES) for each in both()]
    assert result["metrics"] == alone[0]["metrics"] | alone[1]["metrics"]
    assert "first_agreement" in result["metrics"] and "second_score" in result["metrics"]
    assert result["classes"] == alone[0]["classes"] != {}
    assert [each["name"] for each in result["protocol"]["detectors"]] == ["first", "second"]


def test_stored_features_give_the_same_file_without_processing_real_images(data: RealImages, tmp_path: Path) -> None:
    for detector in both():
        write_features(detector, data.image_sets, tmp_path / detector.identity["name"])
    expected = evaluate_samples(images(130, 2), data, both(), NO_COPIES)
    folders = [tmp_path / "second", tmp_path / "first"]
    detectors = both()
    found = evaluate_samples(images(130, 2), data, detectors, NO_COPIES, references=folders)
    assert to_json(found) == to_json(expected)
    assert [each.images_seen for each in detectors] == [144, 144]
    assert found["metrics"]["second_spatial_fd"]["floor"] is not None
    detectors = both()
    evaluate_samples(images(130, 2), data, detectors, NO_COPIES, references=folders[:1])
    assert [each.images_seen for each in detectors] == [144 + 304 + 128 + 160, 144], (
        "one that has not looked yet does so"
    )
    statistics = read_statistics(tmp_path / "first/train.npz", "weights of first")
    assert statistics["fd"].count == 300 and set(statistics) == {"fd", "spatial_fd"}


def test_stored_features_are_read_back(data: RealImages, tmp_path: Path) -> None:
    write_features(both()[0], data.image_sets, tmp_path / "first")
    [seen] = read_features([tmp_path / "first"], both()[:1], data.image_sets)
    assert seen is not None
    detected = seen["train"].detected
    assert detected.features.shape == (300, 12) and detected.logits is not None
    torch.testing.assert_close(detected.features, both()[0](data.train.gather(np.arange(300))).features)
    assert np.load(tmp_path / "first/train-features.npy", mmap_mode="r").dtype == np.float32


def test_features_of_parallel_jobs_join_bit_exactly(data: RealImages, tmp_path: Path) -> None:
    """Some parts have no image of the smaller split."""
    write_features(both()[0], data.image_sets, tmp_path / "one")
    parts, looked = [tmp_path / f"part-{part}.npz" for part in range(12)], []
    for part, path in reversed([*enumerate(parts)]):
        write_part(detector := both()[0], data.image_sets, path, (part, 12))
        looked.append(detector.images_seen)
    assert sum(looked) == 304 + 128 + 160 and max(looked) <= 80
    write_features(joining := both()[0], data.image_sets, tmp_path / "joined", parts=parts)
    assert joining.images_seen == 0
    one, joined = ({path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("one", "joined"))
    assert one == joined

    with pytest.raises(ValueError, match="--made does not hold the whole train split. Name what every part wrote"):
        write_features(both()[0], data.image_sets, tmp_path / "joined", parts=parts[:-1])
    with pytest.raises(ValueError, match="part-0.npz is of other images or another detector. It is removed: run the"):
        write_features(both()[1], data.image_sets, tmp_path / "joined", parts=parts)
    assert not parts[0].exists()
    os.truncate(parts[1], 1000)
    with pytest.raises(ValueError, match=r"part-1.npz is damaged or not an .npz file: .* It is removed: run the same"):
        write_features(both()[0], data.image_sets, tmp_path / "joined", parts=parts[1:])
    assert not parts[1].exists()


def test_features_of_other_detectors_or_images_are_rejected(data: RealImages, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    write_features(both()[0], data.image_sets, folder)

    def judged(images_: RealImages, detectors: list[Quarters]) -> None:
        evaluate_samples(images(130, 2), images_, detectors, NO_COPIES, references=[folder])

    with pytest.raises(ValueError, match=r"is of another detector than those in use \(second\). Run reference again"):
        judged(data, both()[1:])
    with pytest.raises(ValueError, match="was computed on other images than those of the validation split"):
        judged(RealImages(data.train, images(120, 9)), both())
    other_split = images(120, 1)
    other_split.selection = "of files saved again"
    with pytest.raises(ValueError, match="was computed on other images than those of the validation split"):
        judged(RealImages(data.train, other_split), both())
    about = read_json(folder / "reference.json")
    before = {name: {"data": split["data"]} for name, split in about["splits"].items()}
    write_json(folder / "reference.json", about | {"splits": before})
    judged(RealImages(data.train, other_split), both())  # an older version did not write it
    write_json(folder / "reference.json", about | {"format": 0})
    with pytest.raises(ValueError, match="has format 0; this version reads format 2"):
        judged(data, both())
    write_json(folder / "reference.json", about)
    with (folder / "validation-features.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x00")
    with pytest.raises(ValueError, match=r"validation-features.npy is damaged.*Run reference again"):
        judged(data, both())


def test_detectors_may_be_given_by_type_and_only_once() -> None:
    settings = EvaluateConfig.model_validate({"detectors": ["inpipe", {"type": "dinov2", "model": "dinov2_vits14"}]})
    assert [each.type for each in settings.detectors] == ["inpipe", "dinov2"]
    with pytest.raises(ValidationError, match="Two of them call their Fréchet distance fd_dinov2"):
        EvaluateConfig.model_validate({"detectors": ["dinov2", {"type": "dinov2", "weights": "x.pth"}]})
    with pytest.raises(ValidationError):
        EvaluateConfig.model_validate({"detectors": []})
