"""Numbers of an image by name, such as an age or an angle, scaled to [-1, 1] by the ranges of the training images."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BOOLEANS = {"true": 1.0, "false": 0.0}
_MISSING = ("", "nan", "none", "null", "na")


@dataclass(frozen=True)
class NumberColumns:
    """Columns of numbers. names: names of the columns. ranges: the lowest and the highest number of each column in the
    training images, which are scaled to -1 and 1. missing: names of columns that some training images lack; None:
    unknown."""

    names: tuple[str, ...]
    ranges: tuple[tuple[float, float], ...]
    missing: tuple[str, ...] | None = None

    @classmethod
    def described(cls, pairs: Mapping[str, Any]) -> NumberColumns:
        """Return the columns in the description of a manifest or a model."""
        missing = tuple(pairs["missing"]) if "missing" in pairs else None
        return cls(tuple(pairs["columns"]), tuple((low, high) for low, high in pairs["ranges"]), missing)

    def scaled(self, rows: Sequence[Mapping[str, float | None]]) -> Tensor:
        """Return the numbers of N images as float32 [N, columns, 2]: each number on the scale of its range, and 1; a
        missing one is zeros."""
        scaled = torch.zeros(len(rows), len(self.names), 2, dtype=torch.float64)
        for row, values in enumerate(rows):
            for column, (name, (low, high)) in enumerate(zip(self.names, self.ranges, strict=True)):
                if (value := values.get(name)) is not None:
                    scaled[row, column] = torch.tensor([(2 * value - low - high) / (high - low), 1], dtype=scaled.dtype)
        return scaled.float()

    def values(self, scaled: Tensor) -> list[dict[str, float]]:
        """Return the numbers of images by name, from the result of `scaled`, rounded to 7 digits of their range."""
        digits = [6 - math.floor(math.log10(high - low)) for low, high in self.ranges]
        rows = []
        for image in scaled.double().tolist():
            columns = zip(self.names, self.ranges, digits, image, strict=True)
            rows.append(
                {
                    name: round((low + high + (high - low) * value) / 2, places) + 0.0  # -0.0 becomes 0.0
                    for name, (low, high), places, (value, exists) in columns
                    if exists
                }
            )
        return rows

    def outside(self, rows: Sequence[Mapping[str, float | None]]) -> list[str]:
        """Return a phrase for each column with a number outside the range by more than the rounding of `values`."""
        phrases = []
        for name, (low, high) in zip(self.names, self.ranges, strict=True):
            values = [value for row in rows if (value := row.get(name)) is not None]
            margin = 1e-6 * (high - low)
            far = next((value for value in values if not low - margin <= value <= high + margin), None)
            if far is not None:
                phrases.append(f"{name} {far:.10g} (trained on {low:.10g} to {high:.10g})")
        return phrases

    def never_missing(self, rows: Sequence[Mapping[str, float | None]]) -> list[str]:
        """Return the columns that some row lacks, but no training image; empty if unknown."""
        always = [] if self.missing is None else [name for name in self.names if name not in self.missing]
        return [name for name in always if any(row.get(name) is None for row in rows)]


def number_in(cell: Any) -> float | None:
    """Return the number in a cell of a table; None for an empty cell, NaN or null. True and false are 1 and 0.

    Raises ValueError for text that is no number, and for infinity.
    """
    text = "" if cell is None else str(cell).strip()
    if text.lower() in _MISSING:
        return None
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
    if math.isinf(number):
        raise ValueError(f"{text!r} is not finite")
    return None if math.isnan(number) else number


def numbers_of(rows: Sequence[Mapping[str, Any]], key: str, columns: Container[str]) -> list[dict[str, float | None]]:
    """Return the numbers of each row by column. key: configuration key of the rows, for messages. Raises
    ValueError for a value that is not a number."""
    numbers = []
    for position, row in enumerate(rows):
        numbers.append(dict[str, float | None]())
        for name, cell in row.items():
            if name not in columns:
                continue
            try:
                numbers[-1][name] = number_in(cell)
            except ValueError as error:
                raise ValueError(f"{key}: {name} of row {position}: {error}. Give a number, or null.") from None
    return numbers


def measured(names: Sequence[str], rows: Sequence[Mapping[str, float | None]]) -> NumberColumns:
    """Return columns with their ranges in rows. Raises ValueError for a column without two different numbers."""
    ranges = []
    for name in names:
        values = [value for row in rows if (value := row.get(name)) is not None]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        if low == high:
            what = f"is {low:.10g} in every training image" if values else "has no number in any training image"
            raise ValueError(f"pairs.columns: {name} {what}, so that nothing can be learnt from it. Leave it out.")
        ranges.append((low, high))
    missing = tuple(name for name in names if any(row.get(name) is None for row in rows))
    return NumberColumns(tuple(names), tuple(ranges), missing)
