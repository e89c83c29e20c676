"""Tables of paths, with one row per image and optional classes; and text files, with one line per image."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from image_diffusion.core.files.atomic import Stamp, stamp_of
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.core.texts import cell_text, class_name, decoded, lines_in
from image_diffusion.data.sources.arrow import open_table
from image_diffusion.data.sources.base import (
    FewFiles,
    Item,
    Listing,
    RowSource,
    number_labels,
    read_image,
    stamp_if_file,
)

Part = Literal["path", "label", "caption"]
Columns = tuple[dict[str, None], dict[str, list[str]]]
"""Names of all columns of a table, and the cells of the wanted ones by name."""


class PathTable(FewFiles, RowSource):
    """Base of the sources whose rows name image files by paths, absolute or relative to the table."""

    type: str
    """Name of the source."""
    path: str = Field(min_length=1)
    """The table."""

    expected: ClassVar[str]
    """Description of the expected file, for the error if it is missing."""

    @abstractmethod
    def key_columns(self) -> tuple[str, str | None]:
        """Return the names of the path column and of the class column, which is None without classes."""

    @abstractmethod
    def cells(self, *columns: str) -> dict[str, list[str]]:
        """Return the cells of at least these columns, by column. Raises ValueError."""

    def listing(self) -> Listing:
        """Return every row as an image, sorted by path. Raises ValueError for a table that is missing, empty or
        invalid."""
        # Sorted by path, so that reordering the table changes no shard.
        rows = sorted(self._labels(), key=lambda row: row[0])
        numbers = number_labels((label for _, label in rows if label), self.path)
        items: dict[str, Item] = {}
        rejected = []
        for path, label in rows:
            if path in items:
                rejected.append((path, "listed twice"))
            elif label == "":
                rejected.append((path, "no class"))
            else:
                items[path] = Item(path, None if label is None else numbers[label], (path,))
        return Listing(list(items.values()), list(numbers), rejected)

    def known_classes(self) -> list[str] | None:
        if self.key_columns()[1] is None:
            return []
        try:
            return list(number_labels((label for _, label in self._labels() if label), self.path))
        except ValueError:
            return None

    def read(self, item: Item) -> bytes:
        """Return the bytes of one file.

        Raises OSError with the absolute path, which is not in `strerror`: results hold the paths of the table.
        """
        folder = Path(self.path).absolute().parent
        try:
            return read_image(folder / str(item.address[0]))
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            log_line_once(f"note: {self.path} names files that cannot be read. Relative paths begin in {folder}.")
            reason = str(getattr(error, "strerror", None) or error)
            # Results record `strerror`, which must not contain a path of this machine; the log shows the absolute path.
            unread = OSError(f"{reason}: {folder / str(item.address[0])}")
            unread.strerror = reason
            raise unread from None

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """Return the table and every existing image that it lists."""
        table, folder = Path(self.path), Path(self.path).parent
        files = {table.name: (str(table), stamp_of(table))} if table.is_file() else {}
        for name, _ in self._labels():
            path = folder / name
            if stamp := stamp_if_file(path):
                files[name] = (str(path), stamp)
        return files

    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        paths, _ = self.key_columns()
        cells = self.cells(paths, *columns)
        return zip(cells[paths], zip(*(cells[name] for name in columns), strict=True), strict=True)

    def _labels(self) -> list[tuple[str, str | None]]:
        """Return (path, class) of every row; the class is None without a class column, and empty for an empty cell."""
        table, (paths, labels) = Path(self.path), self.key_columns()
        if not table.is_file():
            raise ValueError(f"data.source.path: {table.absolute()} does not exist. Give {self.expected}.")
        cells = self.cells(*filter(None, (paths, labels)))
        if not cells[paths]:
            raise ValueError(f"{table} has no rows. Give one row an image.")
        names = [None] * len(cells[paths]) if labels is None else map(class_name, cells[labels])
        return list(zip(cells[paths], names, strict=True))


class Table(PathTable):
    """A table with a column of paths, absolute or relative to the table, and optionally a column of classes."""

    type: Literal["table"] = "table"
    """A table of paths and classes: CSV, TSV, JSON lines or Parquet."""
    path: str = Field(min_length=1)
    """The table: `.csv` or `.tsv` with a header line, `.jsonl` with one object per line, or `.parquet` (needs the
    package pyarrow)."""
    path_column: str = "path"
    """Name of the column of paths."""
    label_column: str | None = "label"
    """Name of the column of classes, text or numbers; null for unconditional data."""

    expected: ClassVar[str] = "a .csv, .tsv, .jsonl or .parquet file"

    def key_columns(self) -> tuple[str, str | None]:
        return self.path_column, self.label_column

    def cells(self, *columns: str) -> dict[str, list[str]]:
        return read_columns(Path(self.path), *columns)


class PathList(PathTable):
    """A text file with one path per line, absolute or relative to the file, as `find` prints them. A class or a caption
    may follow the path after a tab; a class without a caption may also follow a space, as in the lists of Caffe."""

    type: Literal["list"] = "list"
    """A text file of paths."""
    path: str = Field(min_length=1)
    """Path of the file, encoded in UTF-8. Empty lines are ignored."""
    parts: list[Part] = Field(["path"], min_length=1, max_length=3)
    """Parts of a line, in order, starting with path."""

    expected: ClassVar[str] = "a text file of paths"

    @field_validator("parts")
    @classmethod
    def _has_a_path(cls, value: list[Part]) -> list[Part]:
        if value[0] != "path" or len(set(value)) < len(value):
            raise ValueError(f"{value} must begin with path and name nothing twice. Example: [path, label].")
        return value

    def key_columns(self) -> tuple[str, str | None]:
        return "path", "label" if "label" in self.parts else None

    def cells(self, *columns: str) -> dict[str, list[str]]:
        try:
            lines = lines_in(Path(self.path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{self.path} is not text in UTF-8: {error}.") from None
        rows = [self._parted(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if missing := sorted({*columns} - {*self.parts}):
            raise ValueError(
                f"{self.path} has no {missing[0]}s. Set data.source.parts to [path, {missing[0]}], or as they stand."
            )
        return {part: [row[part] for row in rows] for part in self.parts}

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        return super().read_captions(("caption",))

    def _parted(self, number: int, line: str) -> dict[Part, str]:
        """Return the parts of a line. Raises ValueError if their number is not that of `parts`."""
        cells = line.split("\t") if len(self.parts) > 1 else [line]
        if len(cells) == 1 and self.parts == ["path", "label"]:
            cells = line.rstrip().rsplit(" ", 1)
        if len(cells) != len(self.parts):
            raise ValueError(
                f"{self.path}, line {number}: {line[:80]!r} has {len(cells)} of the parts {', '.join(self.parts)}. "
                "Part them by tabs, or set data.source.parts to what a line holds."
            )
        return {part: cell.strip() for part, cell in zip(self.parts, cells, strict=True)}


def read_columns(table: Path, *wanted: str) -> dict[str, list[str]]:
    """Return columns of a `.csv`, `.tsv`, `.jsonl` or `.parquet` file, cells as text, empty where there is nothing.

    wanted: names of the columns; all if empty. Raises ValueError for a file that cannot be read, or without a wanted
    column.
    """
    names, columns = _READERS.get(table.suffix.lower(), _read_parquet)(table, wanted)
    for name in wanted:
        if name not in names:
            raise ValueError(f"{table} has no column '{name}'. Known: {', '.join(names)}.")
    return columns


def _read_csv(table: Path, wanted: tuple[str, ...], delimiter: str = ",") -> Columns:
    try:
        reader = csv.reader(io.StringIO(decoded(table.read_bytes()), newline=""), strict=True, delimiter=delimiter)
        names = next(reader, [])
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise csv.Error(f"two columns are named {twice!r}")
        rows = []
        for row in reader:
            if any(surplus := row[len(names) :]):  # spreadsheets write empty cells
                raise csv.Error(
                    f"line {reader.line_num} has {len(names) + len(surplus)} cells, the header {len(names)}; "
                    f"put texts with the delimiter {delimiter!r} in quotes"
                )
            if row:  # not a blank line
                rows.append(row)
        return dict.fromkeys(names), {
            name: [cell_text(row[place]) if place < len(row) else "" for row in rows]
            for place, name in enumerate(names)
            if name in (wanted or names)
        }
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{table} is not valid CSV: {error}.") from None


def _read_jsonl(table: Path, wanted: tuple[str, ...]) -> Columns:
    try:
        rows = [json.loads(line) for line in lines_in(table.read_bytes()) if line.strip()]
        names = dict.fromkeys(name for row in rows for name in row.keys())  # noqa: SIM118 - fails if it is no object
        return names, {name: [cell_text(row.get(name)) for row in rows] for name in names if name in (wanted or names)}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{table} is not valid JSON, one object a line: {error}.") from None


def _read_parquet(table: Path, wanted: tuple[str, ...]) -> Columns:
    opened = open_table(table)
    names = opened.schema.names
    cells = opened.columns(wanted or tuple(names))
    return dict.fromkeys(names), {name: list(map(cell_text, cells[name])) for name in cells}


_READERS: dict[str, Callable[[Path, tuple[str, ...]], Columns]] = {
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".jsonl": _read_jsonl,
}
