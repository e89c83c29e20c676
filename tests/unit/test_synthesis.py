"""Statistics, requirements and files of synthetic data sets."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import parse, to_yaml
from image_diffusion.core.files import checksums
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.number_columns import NumberColumns
from image_diffusion.data.sources.tars import Webdataset
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.experiments.resolve import load_all
from image_diffusion.metrics.distances.jackknife import Estimate, share_estimate
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.images.memorization import find_copies, reduced
from image_diffusion.metrics.samples import Samples
from image_diffusion.synthesis import utility as utility_module
from image_diffusion.synthesis.config import (
    SCORES,
    RejectConfig,
    SynthesizeConfig,
    check_count,
    parse_requirement,
    read_table,
    requested,
)
from image_diffusion.synthesis.layouts import WRITERS, SyntheticSet, folder_name
from image_diffusion.synthesis.scorecard import (
    Scores,
    bandwidth,
    effective_number,
    faults,
    measure_privacy,
    membership_auc,
    nearest_distances,
    nearest_ratio,
    score_of,
    true_positives,
)
from image_diffusion.synthesis.selection import chosen, reasons_to_reject, select
from image_diffusion.synthesis.set_folder import DataSetFacts, croissant, data_card, score_page, write_set
from image_diffusion.synthesis.utility import (
    Classification,
    Labelled,
    Regression,
    Task,
    crossed_mean,
    rarest_classes,
    regression,
    train_and_test,
    training_sets,
    utility,
)
from image_diffusion.systems.base import Others


def points(seed: int, count: int, dimension: int = 8) -> Tensor:
    """Points of one distribution."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dimension)))


def near(images: Tensor, synthetic: Tensor) -> Tensor:
    return nearest_distances(images, synthetic)[:, 0]


def test_membership_auc_interval_of_unseen_images_covers_one_half() -> None:
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


def test_memoriser_is_detected_despite_held_out_images_in_training() -> None:
    train, held_out = points(0, 200), points(1, 200)
    held_out[:10] = train[:10]
    found = true_positives(near(train, train), near(held_out, train))
    assert (found.value, found.n) == (1, 200)


def test_auc_is_the_share_of_ordered_pairs() -> None:
    members, others = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.2, 0.4])
    assert membership_auc(members, others).value == pytest.approx((1 + 1 + 0.5 + 1) / 6)
    assert membership_auc(members, others).interval is None
    assert math.isnan(true_positives(members, others).value)


def test_requirements_are_parsed_and_checked() -> None:
    conditions = parse_requirement("copies.upper < 0.01 and  utility.gain.lower >= -1e-3")
    assert [(c.name, c.field, c.sign, c.bound) for c in conditions] == [
        ("copies", "upper", "<", 0.01),
        ("utility.gain", "lower", ">=", -0.001),
    ]
    scores: dict[str, dict[str, Any]] = {
        "copies": {"value": 0.0, "lower": 0.0, "upper": 0.02, "note": ""},
        "utility.gain": {"value": None, "lower": None, "upper": None, "note": "too few"},
    }
    assert conditions[0].violation(scores) == "copies.upper is 0.02"
    assert faults(scores, "copies.upper < 0.01") == ["copies.upper < 0.01: copies.upper is 0.02"]
    assert "was not measured (too few)" in str(conditions[1].violation(scores))
    scores["copies"]["upper"] = 0.009
    assert conditions[0].violation(scores) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("copy.upper < 1", "Unknown score 'copy'"),
        ("copies.top < 1", "Unknown field 'top' of copies. Known: value, lower, upper."),
        ("copies.upper < few", "'few' in"),
        ("utility.real_and_3x > 0", "Unknown score 'utility.real_and_3x'. Did you mean utility.real_and_"),
        ("utility.gain > 0", "needs .value, .lower or .upper after the name: utility.gain.value > 0."),
        ("copies.upper", "is not a comparison"),
        ("copies.upper < 1 or copies.value < 1", "is not a comparison"),
        ("__import__('os').remove('x')", "is not a comparison"),
    ],
)
def test_invalid_requirements_are_rejected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"x: ") as error:
        parse(SynthesizeConfig, {"per_class": 2, "require": text}, "x")
    assert words in str(error.value)


@pytest.mark.parametrize("size", [{}, {"per_class": 2, "like": "train"}, {"like": "train", "table": "x.csv"}])
def test_exactly_one_size_of_the_set_is_required(size: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of per_class, like and table"):
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
def test_training_of_classifiers_is_deterministic() -> None:
    train, test = stripes(200, 0), stripes(100, 1)
    right = train_and_test(train, test, Classification(2), 0, steps=20)
    assert right.mean() > 0.9
    assert torch.equal(right, train_and_test(train, test, Classification(2), 0, steps=20))


def test_training_sets_of_classifiers() -> None:
    real = stripes(10, 0)
    assert {name: len(s) for name, s in training_sets(real, stripes(25, 1)).items()} == {
        "synthetic": 25,
        "real": 10,
        "real_and_1x": 20,
        "real_and_2x": 30,
    }
    assert len(training_sets(real, stripes(4, 1))["real_and_all"]) == 14
    assert rarest_classes(torch.tensor([0, 0, 1, 2, 2, 3, 3]), 4).tolist() == [1]
    assert rarest_classes(torch.tensor([1, 1, 2, 3, 3]), 4).tolist() == [2], "a class without images is not learnt"


@pytest.mark.parametrize(("task", "bounded"), [(Classification(2), True), (Regression(torch.ones(1)), False)])
def test_accuracy_gain_intervals_stay_between_minus_one_and_one(
    monkeypatch: pytest.MonkeyPatch, task: Task, bounded: bool
) -> None:
    def scores(train: Labelled, test: Labelled, task: Task, seed: int, steps: int) -> Tensor:
        """All correct on ten training images with odd seeds and on more with even seeds; else all wrong."""
        return torch.full((len(test),), float(seed % 2 == (len(train) == 10)), dtype=torch.float64)

    monkeypatch.setattr(utility_module, "train_and_test", scores)
    estimates = utility(stripes(10, 0), stripes(10, 1), stripes(40, 2), task, 2, 1, num_classes=2)
    for name in ("gain", "gain_rarest"):
        interval = estimates[name].interval
        assert interval is not None
        assert interval == (-1, 1) if bounded else interval[0] < -1 and interval[1] > 1


def test_the_page_on_synthetic_sets_lists_every_score() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/synthesizing.md").read_text()
    assert not [name for name in SCORES if f"`{name}`" not in page]


def two_classes(count: int = 6) -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return Samples(images, np.arange(count) % 2, ["a/b", "cat"])


def written(samples: Samples, **numbers: list[float | None]) -> SyntheticSet:
    return SyntheticSet(samples, np.arange(5, 5 + samples.num_samples), numbers)


def test_folders_are_read_by_torchvision(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    samples = two_classes()
    WRITERS["folders"](tmp_path, written(samples))
    images = folder(str(tmp_path / "images"))
    assert images.classes == ["a%2Fb", "cat"] and images.targets == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(np.asarray(images[3][0]), samples.gather(np.array([1]))[0].permute(1, 2, 0).numpy())
    assert (tmp_path / "images" / "metadata.csv").read_text().splitlines()[1] == "a%2Fb/00000005.png,a/b,5"
    assert folder_name("..") == "%2E%2E"


def test_class_folders_are_named_by_escaped_class_names(tmp_path: Path) -> None:
    for name in ("花", "Größe 3", "St. Bernard", "{a}"):
        assert folder_name(name) == name
    assert folder_name(".a\\b/c%\n") == "%2Ea%5Cb%2Fc%25%0A"
    long = [letter + "日本" * 60 for letter in "ab"] + ["c" * 300, "c" * 301]
    names = [folder_name(name) for name in long]
    assert len(set(names)) == 4 and max(len(name.encode()) for name in names) <= 255
    images = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    WRITERS["folders"](tmp_path, written(Samples(images, np.arange(4), long)))
    assert sorted(path.name for path in (tmp_path / "images").iterdir() if path.is_dir()) == sorted(names)


def test_tars_are_read_by_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    samples = two_classes()
    WRITERS["webdataset"](tmp_path, written(samples))
    opened = webdataset.WebDataset(str(tmp_path / "shard-00000.tar"), shardshuffle=False)
    rows = list(opened.decode("rgb8").to_tuple("png", "cls", "json"))
    assert [(label, about["seed"]) for _, label, about in rows] == [(row % 2, 5 + row) for row in range(6)]
    assert np.array_equal(rows[1][0], samples.gather(np.array([1]))[0].permute(1, 2, 0).numpy())


def test_tables_hold_the_types_that_datasets_reads(tmp_path: Path) -> None:
    from pyarrow import parquet

    samples = two_classes()
    WRITERS["parquet"](tmp_path, written(samples))
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
def test_requirement_rejects_memorisers_and_accepts_honest_models() -> None:
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


def test_effective_number_counts_distinct_images() -> None:
    centres = 100 * torch.eye(10, dtype=torch.float64)
    each = centres.repeat(40, 1)  # 400 images, 40 at each of 10 centres
    pairs_alike = 39 / 399
    estimate = effective_number(each, 1.0)
    assert estimate.value == pytest.approx(1 / pairs_alike)
    assert effective_number(centres[:1].repeat(200, 1), 1.0).value == pytest.approx(1)
    lone = effective_number(100 * torch.eye(150, dtype=torch.float64), 1.0)
    assert math.isnan(lone.value) and "no two images are alike" in lone.note
    assert math.isnan(effective_number(each[:1], 1.0).value)
    distant = effective_number(4 * torch.eye(8, dtype=torch.float64), 1.0)  # k² is exp(-32): 8e13 is no measurement
    assert math.isnan(distant.value) and "no two images are alike" in distant.note


def test_effective_number_intervals_cover_the_true_value() -> None:
    """Points of a normal distribution, of which E k² is (1 + 4 / sigma²) ** (-dimension / 2)."""
    covered, sigma, dimension = 0, 1.0, 3
    truth = (1 + 4 / sigma**2) ** (dimension / 2)
    for seed in range(200):
        interval = effective_number(points(seed, 200, dimension), sigma).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered >= 0.92 * 200, covered


def test_copies_of_few_images_have_a_small_effective_number() -> None:
    train = points(0, 500)
    sigma = bandwidth(train)
    copies, honest = train[:20].repeat(20, 1) + 0.01 * points(1, 400), points(2, 400)
    estimate = effective_number(copies, sigma)
    assert estimate.interval is not None and estimate.interval[1] < 30
    of_honest = effective_number(honest, sigma).interval
    assert of_honest is not None and of_honest[0] > 3 * estimate.interval[1]
    nearest = torch.cdist(train, train).fill_diagonal_(math.inf).amin(dim=1)
    assert sigma == pytest.approx(float(nearest.median()))


def a_split(classes: list[str]) -> Any:
    """The attributes of the training images that a request reads."""
    return SimpleNamespace(classes=classes, untrained=list, labels=np.array([1, 0, 1]), num_samples=3)


def a_table(tmp_path: Path, text: str) -> str:
    path = tmp_path / "asked.csv"
    path.write_text(text)
    return str(path)


def test_request_table_gives_image_counts_by_row(tmp_path: Path) -> None:
    config = SynthesizeConfig(table=a_table(tmp_path, "label,count\ncat,2\ndog,1\ncat,1\n"))
    request = requested(config, a_split([]), None)
    assert request.drawn(1) == {"num_samples": 4, "keep": True, "labels": ["cat", "cat", "dog", "cat"]}
    assert request.groups.tolist() == [0, 0, 1, 2] and request.num_of_each.tolist() == [2, 1, 1]
    assert request.drawn(1.6)["num_samples"] == 7
    assert request.group_of_each(7).tolist() == [0, 0, 1, 2, 0, 0, 1]
    config = SynthesizeConfig(table=a_table(tmp_path, "age,label,count\n40,cat,1\n,dog,2\n"))
    columns = NumberColumns(("age", "dose"), ((0, 100), (0, 1)))
    asked = requested(config, a_split([]), columns).drawn(1)
    assert asked["conditions"] == [{"age": 40.0, "label": "cat"}, *2 * [{"age": None, "label": "dog"}]]
    assert requested(SynthesizeConfig(per_class=3), a_split([]), None).groups.tolist() == [0, 0, 0]
    like = requested(SynthesizeConfig(like="train"), a_split(["a/b", "cat"]), None)
    assert like.settings["labels"] == ["cat", "a/b", "cat"] and like.num_of_each.tolist() == [1, 2]


def test_sets_too_small_to_score_are_rejected_with_the_key_to_raise(tmp_path: Path) -> None:
    table = a_table(tmp_path, "label,count\n3,4\n")
    for size, cure in (({"per_class": 4}, "Raise synthesize.per_class"), ({"table": table}, "Raise the counts of")):
        source = {"type": "folder", "path": ".", "classes": "none"} if "per_class" in size else {"type": "digits"}
        data = {"name": "x", "source": source, "resolution": 8, "validation_fraction": 0.2}
        system = {"type": "rin", "network": {"patch": 4}}
        text = to_yaml({"data": data, "system": system, "train": {"steps": 1}, "synthesize": size})
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ValueError, match=rf"makes a set of 4, but its scores need at least 5 images\. {cure}"):
            load_all([tmp_path / "x.yaml"])
    with pytest.raises(ValueError, match=r"a set of 4, .* Set synthesize\.per_class in place of like"):
        check_count(SynthesizeConfig(like="train"), 4)


def test_a_fraction_of_spare_images_is_spread_over_the_groups(tmp_path: Path) -> None:
    config = SynthesizeConfig(table=a_table(tmp_path, "label,count\ncat,100\ndog,100\n"))
    request = requested(config, a_split([]), None)
    drawn = request.drawn(1.5)
    groups = request.group_of_each(drawn["num_samples"])
    assert np.bincount(groups).tolist() == [150, 150]
    assert drawn["labels"] == [("cat", "dog")[group] for group in groups]
    assert request.drawn(2)["labels"] == request.settings["labels"], "whole multiples keep their bytes"
    like = requested(SynthesizeConfig(like="train"), a_split(["a/b", "cat"]), None)
    assert like.drawn(1.5)["labels"] == ["cat", "a/b", "cat", "a/b", "cat"]
    balanced = requested(SynthesizeConfig(per_class=4), a_split(["a/b", "cat"]), None)
    assert balanced.drawn(1.5)["labels"] == "balanced"
    assert balanced.group_of_each(12).tolist() == [0, 1] * 6


def test_conditions_include_the_class_where_the_network_takes_it(tmp_path: Path) -> None:
    columns = NumberColumns(("age",), ((0, 100),))
    train = a_split(["a/b", "cat"])
    train.gather_of = lambda kind, rows: columns.scaled([{"age": 10}, {"age": 20}, {"age": 30}])
    like = SynthesizeConfig(like="train")
    assert requested(like, train, columns, takes_classes=False).settings["conditions"][0] == {"age": 10}
    both = requested(like, train, columns).settings
    assert both["conditions"][0] == {"age": 10, "label": "cat"}
    assert both["labels"] == "balanced", "in place of sample.labels"
    table = SynthesizeConfig(table=a_table(tmp_path, "age,label\n40,cat\n"))
    assert requested(table, train, columns).settings["labels"] == "balanced"
    table = SynthesizeConfig(table=a_table(tmp_path, "age\n40\n"))
    assert "labels" not in requested(table, train, columns).settings


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("label,count\ncat,many\n", (), "count of row 0 is 'many'. Give a whole number above 0."),
        ("label,count\ncat,0\n", (), "count of row 0 is '0'"),
        ("label,age\ncat,3\n", (), "has a column age, but the network takes no numbers"),
        ("label,age\ncat,3\n", ("dose",), "names age, which is no column of pairs.columns"),
        ("label\ncat\n", ("dose",), "has no column of numbers. Add some of dose."),
        ("dose\nmuch\n", ("dose",), "'much' is no number"),
        ("label,count\ncat,1\n,1\n", (), "1 of 2 rows name a label"),
        ("label,count\n", (), "has no rows"),
    ],
)
def test_invalid_request_tables_are_rejected(tmp_path: Path, text: str, columns: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match="synthesize.table") as error:
        read_table(a_table(tmp_path, text), columns)
    assert words in str(error.value)


def test_first_accepted_images_of_each_group_fill_the_set() -> None:
    drawn = two_classes(10)
    request = requested(SynthesizeConfig(per_class=2), a_split(["a/b", "cat"]), None)
    no, yes = np.zeros(10, np.bool_), np.zeros(10, np.bool_)
    yes[[0, 1, 4]] = True
    other = no.copy()
    other[[1, 3, 5, 7]] = True
    selection = select(drawn, request, {"confidence": yes, "near_training": other})
    assert selection.rows.tolist() == [2, 6, 9] and selection.num_requested == 4
    assert selection.counts(drawn, "none") == {
        "a/b": counts(drawn=5, confidence=2, near_training=0, rejected=2, kept=2, not_needed=1),
        "cat": counts(drawn=5, confidence=1, near_training=4, rejected=4, kept=1, not_needed=0),
    }
    images = chosen(drawn, selection)
    assert images.labels.tolist() == [0, 0, 1]
    assert torch.equal(images.gather(np.array([2, 0])), drawn.gather(np.array([9, 2])))
    with pytest.raises(ValueError, match=r"rejects all 10 images that were drawn \(10 by confidence\)"):
        select(drawn, request, {"confidence": ~no})


def counts(**of_class: int) -> dict[str, int]:
    return of_class


class Judge:
    """A detector whose probability of class 1 is the brightness of the first pixel."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}
        self.classes, self.doubt = ["a/b", "cat"], None

    def __call__(self, images: Tensor) -> Detected:
        bright = images[:, 0, 0, 0].double() / 255
        return Detected(images.flatten(1).float(), torch.stack([1 - bright, bright], dim=1).log())

    def metric_name(self, metric: str) -> str:
        return metric


def test_images_are_rejected_by_class_confidence_or_nearness_to_training_images() -> None:
    drawn, train, held_out = pictures(0, 120), pictures(1, 200), pictures(2, 150)
    pixels = drawn.gather(np.arange(120)).permute(0, 2, 3, 1).numpy().copy()
    pixels[:5] = train.gather(np.arange(5)).permute(0, 2, 3, 1).numpy()  # copies
    drawn = Samples(pixels, np.arange(120) % 2, ["a/b", "cat"])
    probability = np.where(np.arange(120) % 2, pixels[:, 0, 0, 0] / 255, 1 - pixels[:, 0, 0, 0] / 255)
    every = RejectConfig(confidence=0.7, other_class=True, near_training=True)
    reasons = reasons_to_reject(drawn, RealImages(train, held_out), Judge(), every)
    assert list(reasons) == ["other_class", "confidence", "near_training"]
    assert np.array_equal(reasons["other_class"], probability < 0.5)
    assert np.array_equal(reasons["confidence"], probability < 0.7)
    assert reasons["near_training"][:5].all() and reasons["near_training"][5:].mean() < 0.1
    few = RealImages(train, pictures(2, 50))  # the training images set the threshold
    flagged = reasons_to_reject(drawn, few, Judge(), every)["near_training"]
    assert flagged[:5].all() and flagged[5:].mean() < 0.1
    with pytest.raises(ValueError, match="near_training needs 100 different images, .* but there are 90"):
        reasons_to_reject(drawn, RealImages(pictures(1, 90), pictures(2, 50)), Judge(), every)
    with pytest.raises(ValueError, match="need classes, but the images have none"):
        reasons_to_reject(pictures(0, 120), few, Judge(), RejectConfig(confidence=0.5))


def test_reject_section_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="synthesize.reject names no reason"):
        parse(SynthesizeConfig, {"per_class": 2, "reject": {"drawn": 3}}, "x")


def sloped(count: int, seed: int) -> Labelled:
    """Images whose brightness is their only number, from -1 to 1."""
    values = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, count)).float()
    images = (127.5 + 100 * values)[:, None, None, None].expand(-1, 1, 32, 32).to(torch.uint8)
    numbers = torch.stack([values, torch.ones(count)], dim=1)[:, None]
    return Labelled(images, torch.zeros(count, dtype=torch.int64), numbers)


@pytest.mark.slow
def test_regressors_are_trained_on_images_with_numbers() -> None:
    real, held_out = sloped(100, 0), sloped(150, 1)
    assert held_out.numbers is not None
    held_out.numbers[0] = 0  # missing
    task, complete = regression(held_out)
    assert len(complete) == 149 and complete.numbers is not None
    values = complete.numbers[:, :, 0].double()
    assert task.scores(values, complete).tolist() == [1.0] * 149
    constant = task.scores(values.mean().expand(149, 1), complete)
    assert constant.mean() == pytest.approx(1 / 149, abs=1e-6)  # R² of the mean, with the unbiased variance
    estimates = utility(real, sloped(200, 2), complete, task, 2, 40)
    assert set(estimates) == {"synthetic", "real", "real_and_1x", "real_and_2x", "gain"}
    assert estimates["real"].value > 0.8
    with pytest.raises(ValueError, match="too few held-out images have all numbers"):
        regression(held_out.first(1))


def test_numbers_are_written_in_every_layout(tmp_path: Path) -> None:
    from pyarrow import parquet

    samples = two_classes()
    ages: list[float | None] = [40.0, None, 1.5, 2.0, 3.0, 4.0]
    for layout, write in WRITERS.items():
        (tmp_path / layout).mkdir()
        write(tmp_path / layout, written(samples, age=ages))
    lines = (tmp_path / "folders/images/metadata.csv").read_text().splitlines()
    assert lines[0] == "file_name,label,seed,age"
    assert lines[1:3] == ["a%2Fb/00000005.png,a/b,5,40.0", "cat/00000006.png,cat,6,"]
    with tarfile.open(tmp_path / "webdataset/shard-00000.tar") as tar:
        member = tar.extractfile("00000006.json")
        assert member is not None
        assert json.loads(member.read()) == {"class": "cat", "label": 1, "seed": 6, "age": None}
    tars = Webdataset(path=str(tmp_path / "webdataset"))
    values = [tars.read_values(("age",))[f"shard-00000.tar/{seed:08}"] for seed in range(5, 11)]
    assert [row["age"] for row in values] == ages and tars.listing().classes == ["0", "1"]
    assert parquet.read_table(tmp_path / "parquet/data/train-00000.parquet")["age"].to_pylist() == ages


def test_a_class_without_images_has_no_folder(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    some = two_classes().gather(np.array([1, 3])).permute(0, 2, 3, 1).numpy()
    WRITERS["folders"](tmp_path, written(Samples(some, np.array([1, 1]), ["a/b", "cat"])))
    assert folder(str(tmp_path / "images")).classes == ["cat"]


def test_the_card_and_the_page_say_how_many_were_drawn_and_rejected() -> None:
    facts = DataSetFacts("x", "About x", "None", "Me", "1.0.0", "2026-01-01", {})
    of_class = {"drawn": 9, "confidence": 3, "rejected": 3, "kept": 4, "not_needed": 2}
    scores = {name: score_of(Estimate(0.5, 10), None) for name in SCORES}
    card = data_card(facts, "folders", {"cat": of_class}, scores, "x")
    assert "| Class | Drawn | Rejected: confidence | Rejected in all | Not needed | Images |" in card
    assert "| cat | 9 | 3 | 3 | 2 | 4 |" in card
    page = score_page(facts, scores, "", [], {"cat": of_class})
    assert "<tr><td>cat</td><td>9</td><td>3</td><td>3</td><td>2</td><td>4</td></tr>" in page
    plain = {"drawn": 4, "rejected": 0, "kept": 4, "not_needed": 0}
    assert "| Class | Images |\n| --- | --- |\n| cat | 4 |" in data_card(facts, "folders", {"cat": plain}, scores, "x")
    named = data_card(facts, "folders", {"a|b": plain, "<img src=http://x/y.png>": plain, "[a](b)": plain}, scores, "x")
    assert "| a\\|b | 4 |\n| &lt;img src=http://x/y.png&gt; | 4 |\n| \\[a](b) | 4 |" in named


def test_card_gives_the_command_to_redraw_an_image() -> None:
    def command(**facts: Any) -> str:
        described = DataSetFacts("x", "About x", "None", "Me", "1.0.0", "2026-01-01", {}, **facts)
        scores = {name: score_of(Estimate(0.5, 10), None) for name in SCORES}
        card = data_card(described, "folders", {"cat": {"drawn": 1, "kept": 1}}, scores, "x")
        return card.partition("To draw an image again:")[2].partition("\n\n")[0].strip()

    assert command() == "`image-diffusion sample x --label CLASS --num 1 --set sample.first_seed=SEED`."
    assert command(has_classes=False) == "`image-diffusion sample x --num 1 --set sample.first_seed=SEED`."
    numbers = command(numbers=("age", "body mass: kg"))
    assert numbers.startswith("`image-diffusion sample x --label CLASS --num 1 --set sample.first_seed=SEED ")
    assert """--set 'sample.conditions=[{"age": NUMBER, "body mass: kg": NUMBER}]'`""" in numbers
    assert "`null`" in numbers


def test_sets_with_large_files_are_reproducible_without_extra_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_LARGE_BYTES", 0)
    monkeypatch.setattr(checksums, "_SETTLED_S", 0.0)
    config = SynthesizeConfig(per_class=3, format="webdataset")
    scores = {name: score_of(Estimate(0.5, 6), None) for name in SCORES}
    kept = {"cat": {"drawn": 6, "rejected": 0, "kept": 6, "not_needed": 0}}
    described = {"training_data": {"name": "pets"}}
    for name in ("first", "second"):
        write_set(tmp_path / name, written(two_classes()), config, scores, [], kept, described, "x", Path(__file__))
    assert not list((tmp_path / "first").glob(".*"))
    first, second = ((tmp_path / name / "SHA256SUMS").read_text() for name in ("first", "second"))
    assert first == second and ".verified" not in first


@pytest.mark.parametrize("layout", list(WRITERS))
def test_mlcroissant_validates_and_reads_each_layout(tmp_path: Path, layout: str) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    WRITERS[layout](tmp_path, written(two_classes(), age=[40.0, 2.0, 1.5, 2.0, 3.0, 4.0]))
    files = describe(tmp_path, sorted(path for path in tmp_path.rglob("*") if path.is_file()))
    facts = DataSetFacts("x", "About x", "https://example.org", "Me", "1.0.0", "2026-01-01", files, ("age",))
    (tmp_path / "croissant.json").write_text(json.dumps(croissant(facts, layout)))
    data_set = mlcroissant.Dataset(jsonld=str(tmp_path / "croissant.json"))
    assert not data_set.metadata.ctx.issues.errors
    records = list(data_set.records("images"))
    assert len(records) == 6
    if layout == "webdataset":
        assert sorted(int(record["images/seed"]) for record in records) == list(range(5, 11))
    else:
        assert [record["images/seed"] for record in records] == list(range(5, 11))
        assert [record["images/age"] for record in records] == [40.0, 2.0, 1.5, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("column", ["count", "file_name"])
def test_number_columns_may_not_use_reserved_column_names(column: str) -> None:
    experiment = {
        "data": {"name": "x", "source": {"type": "slanted_digits"}, "resolution": 16, "validation_fraction": 0.1},
        "pairs": {"type": "numbers", "columns": ["slant", column], "table": "numbers.csv"},
        "system": {"type": "dit", "network": {"depth": 1, "width": 32, "num_heads": 2, "patch": 4}},
        "train": {"steps": 2},
        "synthesize": {"like": "train"},
    }
    experiment["system"]["condition"] = [{"type": "label"}, {"type": "numbers"}]  # type: ignore[index]
    with pytest.raises(ValueError, match=f"pairs.columns names {column}, which is another column of the files"):
        check_experiment(parse_experiment(experiment, "x.yaml"), Others())


def test_images_can_be_held_out_by_name() -> None:
    experiment = {
        "data": {"name": "x", "source": {"type": "slanted_digits"}, "resolution": 16, "held_out": ["1*"]},
        "system": {"type": "dit", "network": {"depth": 1, "width": 32, "num_heads": 2, "patch": 4}},
        "train": {"steps": 2},
        "synthesize": {"like": "train"},
    }
    check_experiment(parse_experiment(experiment, "x.yaml"), Others())
    experiment["data"].pop("held_out")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"there are none\. Set data\.validation_fraction: 0\.1 or data\.held_out"):
        check_experiment(parse_experiment(experiment, "x.yaml"), Others())


def test_the_folder_of_a_class_has_no_line_separator() -> None:
    assert folder_name("a\u2028b\u2029c") == "a%E2%80%A8b%E2%80%A9c"
