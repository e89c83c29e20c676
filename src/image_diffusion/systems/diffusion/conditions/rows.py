"""Requested conditions: prompts, as a list or in a file; and rows of numbers, images and classes, as a list, a product
of values, a table, or a request of a served model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.classes import ClassLabel
from image_diffusion.core.texts import lines_in
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
    return [label if isinstance(label, int) else str(label) for label in _named(rows, LABEL, "a label", key)]


def images_of(rows: Sequence[Row], key: str, kind: type[str | bytes]) -> list[str | bytes]:
    """Return the image of each row; empty if no row names one. kind: str, for paths, or bytes, for the content of
    files. Raises ValueError if only some rows name an image, and for an image of another kind."""
    named = _named(rows, IMAGE, "an image", key)
    for row, cell in enumerate(named):
        if not isinstance(cell, kind):
            expected = "the path of an image file" if kind is str else "the bytes of an image file"
            raise ValueError(f"{key}: image of row {row} is of type {type(cell).__name__}. Give {expected}.")
    return named


def _named(rows: Sequence[Row], column: str, one: str, key: str) -> list[Any]:
    named = [cell for row in rows if (cell := row.get(column)) not in (None, "", b"")]
    if named and len(named) < len(rows):
        raise ValueError(f"{key}: {len(named)} of {len(rows)} rows name {one}. Give one to each row, or to none.")
    return named


_PROMPT = "prompt"  # column of a table
EXAMPLE_PROMPTS = ("a white square on black", "a black square on white")
"""Prompts in the example of a request."""


def read_prompts(prompts: tuple[str, ...] | str, key: str) -> list[str]:
    """Read the prompts of a list, of a `.txt` with one per line, or of the column "prompt" of a `.csv` or `.parquet`.

    key: their key in the configuration, for the message. Raises ValueError for a file that cannot be read, and if there
    are no prompts.
    """
    if isinstance(prompts, tuple):
        texts, where = list(prompts), "it"
    else:
        path, where = Path(prompts), prompts
        if not path.is_file():
            raise ValueError(f"{key}: {path} does not exist. Give a .txt, a .csv or a .parquet, or a list of prompts.")
        if path.suffix.lower() in (".csv", ".parquet"):
            texts = read_columns(path, _PROMPT)[_PROMPT]
        else:
            try:
                texts = lines_in(path.read_bytes())
            except ValueError as error:
                raise ValueError(f"{key}: {path} is not text: {error}, one prompt a line.") from None
    texts = [text for line in texts if (text := line.strip())]
    if not texts:
        raise ValueError(f"{key}: {where} holds no prompt. Write one at least.")
    return texts


def classes_named(prompts: list[str], classes: list[str]) -> Tensor | None:
    """Return the class that each prompt names, int64 [N]; None unless each prompt contains the name of exactly one
    class, as whole words."""
    names = [re.compile(rf"(?<!\w){re.escape(name.replace('_', ' '))}(?!\w)", re.IGNORECASE) for name in classes]
    matches: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt not in matches:
            matches[prompt] = [number for number, name in enumerate(names) if name.search(prompt)]
    if not prompts or any(len(numbers) != 1 for numbers in matches.values()):
        return None
    return torch.tensor([matches[prompt][0] for prompt in prompts], dtype=torch.int64)
