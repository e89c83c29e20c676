"""Requested images of a set: a number per class, as many as the training images, or those of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.number_columns import NumberColumns, numbers_of
from image_diffusion.data.shards.reader import Shards
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.synthesis.config import SynthesizeConfig
from image_diffusion.systems.diffusion.conditions.base import check_names, labels_of, read_rows
from image_diffusion.systems.pairs.numbers import LABEL, NumberPairs

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
