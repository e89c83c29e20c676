"""Rows of requested conditions: a list, a product of values, a table, or a request of a served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from image_diffusion.core.classes import ClassLabel
from image_diffusion.core.types import IMAGE
from image_diffusion.data.sources.table import read_columns
from image_diffusion.systems.pairs.numbers import LABEL

Row = dict[str, Any]


def read_rows(conditions: list[Row] | dict[str, list[Any]] | str, key: str) -> list[Row]:
    """Return the rows of a list; of a product, whose last name changes fastest; or of a table.

    key: of the conditions in the configuration, for the message. Raises ValueError for a table that cannot be read.
    """
    if isinstance(conditions, str):
        table = Path(conditions)
        if not table.is_file():
            raise ValueError(f"{key}: {table} does not exist. Give a .csv, .tsv, .jsonl or .parquet, or rows.")
        columns = read_columns(table)
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        if not rows:
            raise ValueError(f"{key}: {table} has no rows. Write one at least.")
        return rows
    if isinstance(conditions, Mapping):
        return [dict(zip(conditions, values, strict=True)) for values in product(*conditions.values())]
    return conditions


def check_names(rows: Sequence[Row], columns: Sequence[str], key: str) -> None:
    """Raise ValueError for a name in a row that is neither a column nor the class."""
    known = (*columns, LABEL)
    for row in rows:
        if unknown := next((name for name in row if name not in known), None):
            raise ValueError(f"{key} names {unknown}, which is no column of pairs.columns. Known: {', '.join(known)}.")


def labels_of(rows: Sequence[Row], key: str) -> list[ClassLabel]:
    """Return the class of each row; empty if no row names one. Raises ValueError if only some do."""
    labels = [row.get(LABEL) for row in rows]
    named = [label for label in labels if label not in (None, "")]
    if named and len(named) < len(rows):
        raise ValueError(f"{key}: {len(named)} of {len(rows)} rows name a label. Give one to each row, or to none.")
    return [label if isinstance(label, int) else str(label) for label in named]


def images_of(rows: Sequence[Row], key: str, kind: type[str | bytes]) -> list[str | bytes]:
    """Return the image of each row; empty if no row names one. kind: str, for paths, or bytes, for the content of
    files. Raises ValueError if only some rows name an image, and for an image of another kind."""
    cells = [row.get(IMAGE) for row in rows]
    named = [cell for cell in cells if cell not in (None, "", b"")]
    if named and len(named) < len(rows):
        raise ValueError(f"{key}: {len(named)} of {len(rows)} rows name an image. Give one to each row, or to none.")
    for row, cell in enumerate(named):
        if not isinstance(cell, kind):
            expected = "the path of an image file" if kind is str else "the bytes of an image file"
            raise ValueError(f"{key}: image of row {row} is of type {type(cell).__name__}. Give {expected}.")
    return named
