"""A table of images: one row an image, its path and its class."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from image_diffusion.core.files import Stamp, stamp_of
from image_diffusion.data.sources.listing import FewFiles, Item, Listing, number_labels, read_image, texts_of


class Table(FewFiles):
    """A CSV or Parquet file with a column of paths, absolute or relative to the table, and perhaps one of classes."""

    type: Literal["table"] = "table"
    """A CSV or Parquet file of paths and classes."""
    path: str = Field(min_length=1)
    """The table: `.csv` with a header line, or `.parquet` (which needs the package pyarrow)."""
    path_column: str = "path"
    """Name of the column of paths."""
    label_column: str | None = "label"
    """Name of the column of classes, text or numbers; null for unconditional data."""

    def listing(self) -> Listing:
        """Every row as an image, sorted by path. Raises ValueError for a table that is missing, empty or unfit."""
        return listing_of(self._rows(), self.path)

    def known_classes(self) -> list[str] | None:
        """Those in the column of classes; None where the table is not there yet."""
        if self.label_column is None:
            return []
        try:
            return list(number_labels((label for _, label in self._rows() if label), self.path))
        except ValueError:
            return None

    def read(self, item: Item) -> bytes:
        """The bytes of one file. Raises OSError, with the whole path that was tried."""
        return read_named(Path(self.path), item)

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in columns of the table, by path."""
        table = Path(self.path)
        return captions_of_rows(read_columns(table, self.path_column, *columns), self.path_column, columns)

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Columns of the table, by path."""
        cells = read_columns(Path(self.path), self.path_column, *names)
        rows = zip(*(cells[name] for name in names), strict=True)
        return {
            path: dict(zip(names, row, strict=True)) for path, row in zip(cells[self.path_column], rows, strict=True)
        }

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The table, and every image in it that is there."""
        return files_named(Path(self.path), (path for path, _ in self._rows()))

    def _rows(self) -> list[tuple[str, str | None]]:
        """(path, class) of every row; the class is None without a column of classes, empty where a cell is."""
        table = Path(self.path)
        if not table.is_file():
            raise ValueError(f"data.source.path: {table.absolute()} does not exist. Give a .csv or .parquet file.")
        columns = read_columns(table, *filter(None, (self.path_column, self.label_column)))
        paths = columns[self.path_column]
        if not paths:
            raise ValueError(f"{table} has no rows. Give one row an image.")
        labels = [None] * len(paths) if self.label_column is None else columns[self.label_column]
        return list(zip(paths, labels, strict=True))


def listing_of(rows: Iterable[tuple[str, str | None]], where: str) -> Listing:
    """Every row, (path, class), as an image, sorted by path. The class is None where there are none, empty where it is
    missing. where: the rows stand. Raises ValueError."""
    rows = sorted(rows, key=lambda row: row[0])
    numbers = number_labels((label for _, label in rows if label), where)
    items: dict[str, Item] = {}
    rejected = []
    for path, label in rows:
        if path in items:
            rejected.append((path, "listed twice"))
        elif label == "":
            rejected.append((path, "no class"))
        else:
            items[path] = Item(path, None if label is None else numbers[label], (path,))
    return Listing(list(items.values()), list(numbers), rejected, 0)


def read_named(table: Path, item: Item) -> bytes:
    """The bytes of a file whose path stands in a table. Raises OSError, with the whole path that was tried."""
    where = table.absolute().parent / str(item.address[0])
    try:
        return read_image(where)
    except OSError as error:
        raise OSError(f"{error.strerror or error}: {where}") from None


def files_named(table: Path, paths: Iterable[str]) -> dict[str, tuple[str, Stamp]]:
    """A table, and every image in it that is there."""
    found = {table.name: (str(table), stamp_of(table))} if table.is_file() else {}
    for path in paths:
        where = table.parent / path
        if where.is_file():
            found[path] = (str(where), stamp_of(where))
    return found


def read_columns(table: Path, *wanted: str) -> dict[str, list[str]]:
    """The columns of a `.csv` or `.parquet` file, cells as text, empty where there is nothing.

    Raises ValueError for a file that cannot be read, or without a wanted column.
    """
    columns = _read_csv(table) if table.suffix.lower() == ".csv" else _read_parquet(table)
    for name in wanted:
        if name not in columns:
            raise ValueError(f"{table} has no column '{name}'. Known: {', '.join(columns)}.")
    return columns


def captions_of_rows(
    cells: dict[str, list[str]], path_column: str, caption_columns: tuple[str, ...]
) -> dict[str, list[str]]:
    """The captions of each image, column by column; an image that several rows name has those of all of them."""
    found: dict[str, list[str]] = {}
    for row, path in enumerate(cells[path_column]):
        found.setdefault(path, []).extend(texts_of([cells[name][row] for name in caption_columns]))
    return found


def _read_csv(table: Path) -> dict[str, list[str]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
            return {name: [(row[name] or "").strip() for row in rows] for name in reader.fieldnames or []}
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{table} is not valid CSV: {error}.") from None


def _read_parquet(table: Path) -> dict[str, list[str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{table}: reading Parquet needs the package pyarrow. Install it, or give a CSV.") from None
    try:
        columns = pyarrow.parquet.read_table(table).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{table} is not valid Parquet: {' '.join(str(error).split())}") from None
    return {name: ["" if cell is None else str(cell) for cell in cells] for name, cells in columns.items()}
