"""Requirements of a set of synthetic images: its settings, the scores and the requirements on them, and the requested
images: a number per class, as many as the training images, or those of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config, Sparse
from image_diffusion.core.config.errors import suggestion
from image_diffusion.core.number_columns import NumberColumns, numbers_of
from image_diffusion.data.shards.reader import Shards
from image_diffusion.metrics.choice import Condition, parse_conditions
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.systems.diffusion.conditions.base import check_names, labels_of, read_rows
from image_diffusion.systems.pairs.numbers import LABEL, NumberPairs

_EXAMPLE = "copies.upper < 0.05 and utility.gain.lower > 0"


@dataclass(frozen=True)
class Score:
    """A score. group: of the scorecard. better: the direction; empty if there is none. meaning: in plain words. metric:
    its name in `evaluate`; empty if it is measured here."""

    group: str
    better: str
    meaning: str
    metric: str = ""


SCORES = {
    "fd": Score("Fidelity", "lower", "Fréchet distance to the training images", "inpipe_fd"),
    "class_fd": Score("Fidelity", "lower", "Fréchet distance within a class, mean over classes", "inpipe_class_fd"),
    "agreement": Score(
        "Fidelity", "higher", "share of images that the detector recognises as their class", "inpipe_agreement"
    ),
    "precision": Score("Fidelity", "higher", "share of images that look like training images", "inpipe_precision"),
    "recall": Score("Diversity", "higher", "share of training images that look like synthetic ones", "inpipe_recall"),
    "coverage": Score("Diversity", "higher", "share of training images near a synthetic one", "inpipe_coverage"),
    "effective_number": Score(
        "Diversity", "higher", "different images that the set amounts to (Vendi score of order two)"
    ),
    "utility.real": Score("Utility", "higher", "accuracy of a classifier trained on real images alone"),
    "utility.synthetic": Score("Utility", "higher", "accuracy of a classifier trained on synthetic images alone"),
    "utility.real_and_1x": Score("Utility", "higher", "accuracy with as many synthetic as real images"),
    "utility.real_and_2x": Score("Utility", "higher", "accuracy with twice as many synthetic as real images"),
    "utility.real_and_4x": Score("Utility", "higher", "accuracy with four times as many synthetic as real images"),
    "utility.real_and_all": Score("Utility", "higher", "accuracy with all synthetic images, fewer than real ones"),
    "utility.gain": Score("Utility", "higher", "accuracy with the most synthetic images, less utility.real"),
    "utility.gain_rarest": Score("Utility", "higher", "the same gain on the rarest quarter of the classes"),
    "copies": Score("Privacy", "lower", "share nearer to a training image than 99 % of real images", "copies"),
    "copies_in_features": Score("Privacy", "lower", "the same share in the detector's features", "inpipe_copies"),
    "nearest_ratio": Score("Privacy", "", "distance to the nearest over that to the second nearest training image"),
    "membership.auc": Score(
        "Privacy", "lower", "probability that a training image is nearer to the set than a held-out one"
    ),
    "membership.true_positives": Score("Privacy", "lower", "training images recognised at 1 % false positives, share"),
}
"""Scores by their names in requirements, in the order of the page."""


def parse_requirement(text: str) -> list[Condition]:
    """Return the conditions of a requirement such as `copies.upper < 0.05 and utility.gain.lower > 0`; none if it is
    empty. Raises ValueError for anything but comparisons of a known number with a bound."""
    return parse_conditions(text, "score", _check_score, _EXAMPLE)


def _check_score(name: str) -> None:
    if name not in SCORES:
        raise ValueError(f"Unknown score {name!r}. {suggestion(name, list(SCORES))}")


class RejectConfig(Config):
    """Selection of the images. At least one reason for rejection is set. The first images that are not rejected form
    the set."""

    confidence: float = Field(0.0, ge=0, lt=1)
    """Reject images if the data set's own detector gives their class a lower probability; 0: reject none."""
    other_class: bool = False
    """Reject images that the detector assigns to another class than the requested one."""
    near_training: bool = False
    """Reject images that are nearer to a training image than 99 % of the held-out images are (or, with fewer than 100
    held-out images, than 99 % of the training images are to one another), as the score `copies` counts them."""
    drawn: float = Field(2.0, gt=1, le=100)
    """Number of images drawn per image of the set. If too few pass, the set is smaller."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> Self:
        if not (self.confidence or self.other_class or self.near_training):
            raise ValueError(
                "synthesize.reject names no reason. Set confidence: 0.5, other_class: true or near_training: true."
            )
        return self

    @property
    def needs_classes(self) -> bool:
        """True if the images are selected by their classes."""
        return self.confidence > 0 or self.other_class


class SynthesizeConfig(Sparse):
    """Data set of synthetic images, and the scores that it must reach. Exactly one of `per_class`, `like` and `table`
    is set. The section `sample` has the settings of the images, except their number, classes and numbers."""

    if_set: ClassVar[frozenset[str]] = frozenset({"table", "reject", "num_jobs"})

    per_class: int | None = Field(None, ge=1)
    """Number of images of each class with training images; without classes, number of all images."""
    like: Literal["train"] | None = None
    """train: as many images of each class as the training set has; with the numbers of the training images, if the
    network is conditioned on numbers."""
    table: str | None = None
    """Table with a row for each kind of image (`.csv`, `.tsv`, `.jsonl` or `.parquet`): the class in the column
    `label`, each number in its own column, and the number of images in the column `count`; 1 without that column."""
    format: Literal["folders", "webdataset", "parquet"] = "folders"
    """Layout of the images: PNGs in a folder for each class (torchvision's ImageFolder), tars (webdataset), or Parquet
    files that contain the PNGs (datasets of Hugging Face)."""
    reject: RejectConfig | None = None
    """Selection among the images drawn; unset: all images are kept."""
    require: str = ""
    """Scores that the set must reach to be released, as comparisons joined by `and`: `copies.upper < 0.05 and
    utility.gain.lower > 0`. Each score has value, lower and upper. Empty: the set is always released."""
    classifier_seeds: int = Field(3, ge=2, le=20)
    """Number of classifiers trained on each training set of the utility scores."""
    classifier_steps: int = Field(300, ge=1)
    """Training steps of each of these classifiers, with 64 images per step."""
    num_jobs: int = Field(1, ge=1, le=64)
    """Number of parallel jobs that draw the images. It does not change the images."""

    @model_validator(mode="after")
    def _one_size_and_known_scores(self) -> Self:
        if sum(size is not None for size in (self.per_class, self.like, self.table)) != 1:
            raise ValueError(
                "synthesize takes exactly one of per_class, like and table. Set per_class: 1000, like: train, or "
                "table: FILE."
            )
        parse_requirement(self.require)
        return self


COUNT = "count"
"""Column of a table with the number of images of a row."""
TAKEN = frozenset({COUNT, "file_name"})
"""Further names that a column of numbers must not have: names of other columns of tables and sets."""
LEAST = EvaluateConfig().least_samples
"""Size of the smallest set that can be scored."""
_KEY = "synthesize.table"


@dataclass(frozen=True)
class Request:
    """Requested images of a set.

    settings: values of the section `sample` that draw the `num_samples` images; more images repeat the request. groups:
    int64 [N], the group of each image: its class, or its row of the table. Images of a group are interchangeable.
    """

    settings: dict[str, Any]
    groups: NDArray[np.int64]

    @property
    def num_of_each(self) -> NDArray[np.int64]:
        """Return the number of images of each group, int64 [G]."""
        return np.bincount(self.groups)

    def drawn(self, times: float) -> dict[str, Any]:
        """Return the values of the section `sample` that draw `times` as many images."""
        count = int(np.ceil(times * len(self.groups)))
        drawn = self.settings | {"num_samples": count}
        if count % len(self.groups):  # otherwise lists repeat in turn
            rows = self._rows(count).tolist()
            drawn |= {key: [of[row] for row in rows] for key, of in self.settings.items() if isinstance(of, list)}
        return drawn

    def group_of_each(self, num_drawn: int) -> NDArray[np.int64]:
        """Return the group of each image that was drawn, int64 [num_drawn]."""
        return self.groups[self._rows(num_drawn)]

    def _rows(self, num_drawn: int) -> NDArray[np.int64]:
        """Return the requested image that each drawn image repeats: all in turn. If the settings list classes or
        conditions, those after the last full turn are the same share of each group."""
        turns, spare = divmod(num_drawn, len(self.groups))
        rows = np.arange(num_drawn) % len(self.groups)
        if spare and any(isinstance(value, list) for value in self.settings.values()):
            by_group = np.argsort(self.groups, kind="stable")
            rows[turns * len(self.groups) :] = by_group[np.arange(spare) * len(self.groups) // spare]
        return rows


def requested(
    config: SynthesizeConfig, train: Shards, columns: NumberColumns | None, takes_classes: bool = True
) -> Request:
    """Return the requested images of a set. columns: the numbers that the network is conditioned on, if any, which are
    joined to `train`. takes_classes: whether it is conditioned on the class, too."""
    if config.table is not None:
        return _of_table(config.table, columns.names if columns is not None else ())
    if config.like == "train":
        return _like(train, columns, takes_classes)
    assert config.per_class is not None
    num_classes = len(train.classes) - len(train.untrained()) if train.classes else 1
    return _request({"labels": "balanced"}, np.arange(config.per_class * num_classes) % num_classes)


def check_count(config: SynthesizeConfig, count: int) -> None:
    """Raise ValueError for a set of fewer images than its scores need."""
    if count >= LEAST:
        return
    cures = {
        "per_class": "Raise synthesize.per_class",
        "table": "Raise the counts of synthesize.table",
        "like": "Set synthesize.per_class in place of like",
    }
    cure = next(cure for key, cure in cures.items() if getattr(config, key) is not None)
    raise ValueError(f"synthesize makes a set of {count}, but its scores need at least {LEAST} images. {cure}.")


def read_table(path: str, columns: Sequence[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of a table, each with the class under "label" and numbers by name, and the number of images of
    each. columns: the numbers that the network is conditioned on.

    Raises ValueError for a table that cannot be read or does not fit.
    """
    rows = read_rows(path, _KEY)
    counts = [_count(row.pop(COUNT, "1"), place) for place, row in enumerate(rows)]
    if columns:
        check_names(rows, columns, _KEY)
    elif unknown := next((name for name in rows[0] if name != LABEL), None):
        raise ValueError(f"{_KEY} has a column {unknown}, but the network takes no numbers. Known: {LABEL}, {COUNT}.")
    labels, numbers = labels_of(rows, _KEY), numbers_of(rows, _KEY, columns)
    if columns and not rows[0].keys() & set(columns):
        raise ValueError(f"{_KEY} has no column of numbers. Add some of {', '.join(columns)}.")
    return [row | ({LABEL: labels[place]} if labels else {}) for place, row in enumerate(numbers)], counts


def _count(cell: Any, place: int) -> int:
    text = str(cell).strip()
    if not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{_KEY}: {COUNT} of row {place} is {text!r}. Give a whole number above 0.")
    return int(text)


def _of_table(path: str, columns: Sequence[str]) -> Request:
    rows, counts = read_table(path, columns)
    groups = np.repeat(np.arange(len(rows)), counts)
    if columns:
        return _request_of_rows([rows[group] for group in groups.tolist()], groups)
    labelled = LABEL in rows[0]
    return _request({"labels": [rows[group][LABEL] for group in groups.tolist()] if labelled else "balanced"}, groups)


def _like(train: Shards, columns: NumberColumns | None, takes_classes: bool) -> Request:
    labels = [train.classes[label] for label in train.labels.tolist()] if train.classes and takes_classes else []
    if columns is None:
        return _request({"labels": labels or "balanced"}, train.labels.astype(np.int64))
    scaled = train.gather_of(NumberPairs.kind, np.arange(train.num_samples))
    rows: list[Mapping[str, Any]] = [
        row | ({LABEL: labels[place]} if labels else {}) for place, row in enumerate(columns.values(scaled))
    ]
    return _request_of_rows(rows, np.arange(train.num_samples))


def _request_of_rows(rows: Sequence[Mapping[str, Any]], groups: NDArray[np.int64]) -> Request:
    """Return the request for images of rows, whose classes replace those of the section `sample`."""
    return _request({"conditions": rows} | ({"labels": "balanced"} if LABEL in rows[0] else {}), groups)


def _request(settings: dict[str, Any], groups: NDArray[np.int64]) -> Request:
    return Request({"num_samples": len(groups), "keep": True} | settings, groups)
