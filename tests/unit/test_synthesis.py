"""Statistics, requirement and files of synthetic data sets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.images.memorization import find_copies, reduced
from image_diffusion.metrics.samples import Samples
from image_diffusion.synthesis.config import SynthesizeConfig
from image_diffusion.synthesis.croissant import DataSetFacts, croissant
from image_diffusion.synthesis.layouts import WRITERS, folder_name, synthetic_images
from image_diffusion.synthesis.privacy import membership_auc, nearest_distances, nearest_ratio, true_positives
from image_diffusion.synthesis.scorecard import Scores, faults, measure_privacy, score_of
from image_diffusion.synthesis.scores import parse_requirement
from image_diffusion.synthesis.utility import Labelled, crossed_mean, rarest_classes, train_and_test, training_sets


def points(seed: int, count: int, dimension: int = 8) -> Tensor:
    """Points of one distribution."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dimension)))


def near(images: Tensor, synthetic: Tensor) -> Tensor:
    return nearest_distances(images, synthetic)[:, 0]


def test_the_membership_auc_of_a_set_of_unseen_images_covers_one_half() -> None:
    covered, values = 0, []
    for seed in range(200):
        train, held_out, synthetic = points(3 * seed, 150), points(3 * seed + 1, 100), points(3 * seed + 2, 200)
        estimate = membership_auc(near(train, synthetic), near(held_out, synthetic))
        assert estimate.interval is not None
        covered += estimate.interval[0] <= 0.5 <= estimate.interval[1]
        values.append(estimate.value)
    assert 0.92 * 200 <= covered <= 199, covered
    assert abs(float(np.mean(values)) - 0.5) < 0.01


@pytest.mark.parametrize("copied", [200, 50])
def test_a_memoriser_is_detected(copied: int) -> None:
    train, held_out = points(0, 200), points(1, 200)
    copies = train[:copied] + 0.001 * points(2, copied)
    synthetic = torch.cat([copies, points(3, 200 - copied)])
    auc = membership_auc(near(train, synthetic), near(held_out, synthetic))
    found = true_positives(near(train, synthetic), near(held_out, synthetic))
    ratio = nearest_ratio(synthetic, train)
    assert auc.interval is not None and found.interval is not None and ratio.interval is not None
    assert auc.interval[0] > 0.5
    assert found.interval[0] > 0.15
    assert ratio.interval[1] < nearest_ratio(held_out, train).value


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    members, others = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.2, 0.4])
    assert membership_auc(members, others).value == pytest.approx((1 + 1 + 0.5 + 1) / 6)
    assert membership_auc(members, others).interval is None
    assert math.isnan(true_positives(members, others).value)


def test_a_requirement_holds_by_its_numbers() -> None:
    conditions = parse_requirement("copies.upper < 0.01 and  utility.gain.lower >= -1e-3")
    assert [(c.score, c.field, c.sign, c.bound) for c in conditions] == [
        ("copies", "upper", "<", 0.01),
        ("utility.gain", "lower", ">=", -0.001),
    ]
    scores: dict[str, dict[str, Any]] = {
        "copies": {"value": 0.0, "lower": 0.0, "upper": 0.02, "note": ""},
        "utility.gain": {"value": None, "lower": None, "upper": None, "note": "too few"},
    }
    assert conditions[0].fault(scores) == "copies.upper < 0.01: copies.upper is 0.02"
    assert "was not measured (too few)" in str(conditions[1].fault(scores))
    scores["copies"]["upper"] = 0.009
    assert conditions[0].fault(scores) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("copy.upper < 1", "Unknown score 'copy'"),
        ("copies.top < 1", "Unknown field 'top' of copies. Known: value, lower, upper."),
        ("copies.upper < few", "'few' in"),
        ("copies.upper", "is not a comparison"),
        ("copies.upper < 1 or copies.value < 1", "is not a comparison"),
        ("__import__('os').remove('x')", "is not a comparison"),
    ],
)
def test_a_requirement_that_cannot_be_checked_is_an_error_before_any_work(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"x: ") as error:
        parse(SynthesizeConfig, {"per_class": 2, "require": text}, "x")
    assert words in str(error.value)


@pytest.mark.parametrize("size", [{}, {"per_class": 2, "like": "train"}])
def test_a_set_has_one_size(size: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of per_class and like"):
        parse(SynthesizeConfig, size, "x")


def test_an_interval_over_seeds_and_images_covers_the_mean() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        values = rng.normal(size=(3, 1)) + rng.normal(size=(1, 40)) + rng.normal(size=(3, 40))
        interval = crossed_mean(torch.from_numpy(values)).interval
        assert interval is not None
        covered += interval[0] <= 0 <= interval[1]
    assert covered >= 188, covered
    same = crossed_mean(torch.zeros(3, 100)).interval
    assert same is not None and 0.01 < same[1] < 0.03
    assert crossed_mean(torch.ones(3, 1)).interval is None


def stripes(count: int, seed: int) -> Labelled:
    """Images of two classes: bright above or bright below, under noise."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, 2, count))
    images = rng.integers(0, 200, (count, 1, 32, 32))
    for row, label in enumerate(labels.tolist()):
        images[row, :, 16 * label : 16 * label + 16] += 55
    return Labelled(torch.from_numpy(images.astype(np.uint8)), labels)


@pytest.mark.slow
def test_a_classifier_learns_the_same_from_the_same_seed() -> None:
    train, test = stripes(200, 0), stripes(100, 1)
    right = train_and_test(train, test, 2, 0, steps=20)
    assert right.float().mean() > 0.9
    assert torch.equal(right, train_and_test(train, test, 2, 0, steps=20))


def test_the_sets_that_classifiers_are_trained_on() -> None:
    real = stripes(10, 0)
    assert {name: len(s) for name, s in training_sets(real, stripes(25, 1)).items()} == {
        "synthetic": 25,
        "real": 10,
        "real_and_1x": 20,
        "real_and_2x": 30,
    }
    assert len(training_sets(real, stripes(4, 1))["real_and_all"]) == 14
    assert rarest_classes(torch.tensor([0, 0, 1, 2, 2, 3, 3]), 4).tolist() == [1]


def two_classes(count: int = 6) -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return Samples(images, np.arange(count) % 2, ["a/b", "cat"])


def test_folders_are_read_by_torchvision(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    samples = two_classes()
    WRITERS["folders"](tmp_path, synthetic_images(samples, 5), samples.classes)
    images = folder(str(tmp_path / "images"))
    assert images.classes == ["a%2Fb", "cat"] and images.targets == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(np.asarray(images[3][0]), samples.gather(np.array([1]))[0].permute(1, 2, 0).numpy())
    assert (tmp_path / "images" / "metadata.csv").read_text().splitlines()[1] == "a%2Fb/00000005.png,a/b,5"
    assert folder_name("..") == "%2E%2E"


def test_tars_are_read_by_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    samples = two_classes()
    WRITERS["webdataset"](tmp_path, synthetic_images(samples, 5), samples.classes)
    written = webdataset.WebDataset(str(tmp_path / "shard-00000.tar"), shardshuffle=False)
    rows = list(written.decode("rgb8").to_tuple("png", "cls", "json"))
    assert [(label, about["seed"]) for _, label, about in rows] == [(row % 2, 5 + row) for row in range(6)]
    assert np.array_equal(rows[1][0], samples.gather(np.array([1]))[0].permute(1, 2, 0).numpy())


def test_tables_hold_the_types_that_datasets_reads(tmp_path: Path) -> None:
    from pyarrow import parquet

    samples = two_classes()
    WRITERS["parquet"](tmp_path, synthetic_images(samples, 5), samples.classes)
    path = tmp_path / "data" / "train-00000.parquet"
    assert parquet.read_table(path)["seed"].to_pylist() == list(range(5, 11))
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["label"].names == ["a/b", "cat"]
    assert np.array_equal(np.asarray(rows[1]["image"]), samples.gather(np.array([1]))[0].permute(1, 2, 0).numpy())


def pictures(seed: int, count: int) -> Samples:
    """Smooth pictures of one distribution."""
    coarse = np.random.default_rng([7, seed]).integers(0, 256, (count, 4, 4, 1), dtype=np.uint8)
    return Samples(coarse.repeat(4, axis=1).repeat(4, axis=2), None, [])


def noisy(copied: Samples, seed: int, count: int) -> Samples:
    """Copies of pictures, each under its own noise."""
    rng = np.random.default_rng([8, seed])
    pixels = copied.gather(rng.integers(0, copied.num_samples, count)).permute(0, 2, 3, 1).numpy().astype(np.int64)
    return Samples((pixels + rng.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8), None, [])


def privacy_scores(synthetic: Samples, train: Samples, held_out: Samples) -> Scores:
    everything = torch.arange(synthetic.num_samples).numpy()
    copies = find_copies(reduced(synthetic.gather(everything)).features, train, held_out)
    scores = measure_privacy(synthetic, RealImages(train, held_out))
    return scores | {"copies": score_of(share_estimate(copies.flagged), None)}


@pytest.mark.slow
def test_the_requirement_stops_every_memoriser_and_lets_honest_models_pass() -> None:
    requirement, stopped, passed = "copies.upper < 0.1 and membership.auc.upper < 0.65", 0, 0
    for seed in range(20):
        held_out = pictures(3 * seed, 200)
        few, many = pictures(3 * seed + 1, 50), pictures(3 * seed + 1, 300)
        stopped += bool(faults(privacy_scores(noisy(few, seed, 300), few, held_out), requirement))
        passed += not faults(privacy_scores(pictures(3 * seed + 2, 300), many, held_out), requirement)
    assert stopped == 20 and passed >= 19, (stopped, passed)


def test_the_files_of_each_layout_are_described_in_croissant() -> None:
    names = {"folders": "images/metadata.csv", "webdataset": "shard-00000.tar", "parquet": "data/train-00000.parquet"}
    for layout, name in names.items():
        facts = DataSetFacts("x", "About x", "None", "Me", "1.0.0", "2026-01-01", {name: "0" * 64})
        described = croissant(facts, layout)
        assert {"@context", "@type", "conformsTo", "name", "description", "license", "url", "creator"} <= set(described)
        assert described["distribution"][0]["sha256"] == "0" * 64
        identities = {entity["@id"] for entity in described["distribution"]}
        for field in described["recordSet"][0]["field"]:
            source = field["source"].get("fileSet") or field["source"]["fileObject"]
            assert source["@id"] in identities
