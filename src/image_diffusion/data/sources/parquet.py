"""Parquet files that hold the images themselves, as data sets on the Hugging Face hub do; read without its packages."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from image_diffusion.core.files import Stamp, stamp_of
from image_diffusion.data.sources.listing import (
    FewFiles,
    Item,
    Listing,
    check_size,
    number_labels,
    plain_text,
    texts_of,
)


class Parquet(FewFiles):
    """Parquet files with a column of image files, each as bytes or as a struct with the field `bytes`, and perhaps one
    of classes. Needs the package pyarrow.

    Names of classes are those that `datasets` noted in the files; without them the cells are the classes. Images are
    read one row group at a time, and never decoded twice. An image is named by its file and row.
    """

    type: Literal["parquet"] = "parquet"
    """Parquet files that hold the images themselves."""
    path: str = Field(min_length=1)
    """A file, a folder (every `.parquet` in it is read), or a pattern: `data/train-*.parquet`."""
    image_column: str = "image"
    """Name of the column of images."""
    label_column: str | None = "label"
    """Name of the column of classes, text or whole numbers; null for unconditional data."""

    def listing(self) -> Listing:
        """Every row as an image, sorted by file and row. Raises ValueError for files or columns that do not fit."""
        rows = [
            (Item(f"{name}/{row:09d}", None, (path, group, place), f"{name}/{group}"), label)
            for name, (path, _) in self.files().items()
            for row, ((group, place), label) in enumerate(self._rows(Path(path)))
        ]
        if not rows:
            raise ValueError(f"data.source.path: {self.path} has no rows. Give one row an image.")
        if self.label_column is None:
            return Listing([item for item, _ in rows], [], [], 0)
        classes = self.known_classes()
        if classes is not None:
            numbers = {number: number for number in range(len(classes))}
            told = [(item, numbers.get(label)) for item, label in rows]
        else:
            texts = number_labels((str(label) for _, label in rows if label is not None), self.path)
            classes = list(texts)
            told = [(item, None if label is None else texts[str(label)]) for item, label in rows]
        items = [Item(item.name, number, item.address, item.together) for item, number in told if number is not None]
        return Listing(items, classes, [(item.name, "no class") for item, number in told if number is None], 0)

    def known_classes(self) -> list[str] | None:
        """Those that the first file names; None where it names none, or is not there yet."""
        if self.label_column is None:
            return []
        try:
            path, _ = next(iter(self.files().values()))
            features = json.loads(_open(Path(path)).schema_arrow.metadata[b"huggingface"])["info"]["features"]
            return [str(name) for name in features[self.label_column]["names"]]
        except (ValueError, KeyError, TypeError):
            return None

    def read(self, item: Item) -> bytes:
        """The bytes of one image file. Raises OSError."""
        path, group, place = item.address
        try:
            images = _images(str(path), stamp_of(Path(str(path))), int(group), self.image_column)
        except ValueError as error:
            raise OSError(str(error)) from None
        data: bytes | None = images[int(place)].as_py()
        if data is None:
            raise OSError("the row holds no bytes of an image")
        check_size(len(data))
        return data

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in columns of the files, each a text or a list of texts, by the name of the image."""
        found: dict[str, list[str]] = {}
        for name, (path, _) in self.files().items():
            cells = _columns(Path(path), columns)
            rows = enumerate(zip(*(cells[column] for column in columns), strict=True))
            found |= {f"{name}/{row:09d}": [text for cell in told for text in texts_of(cell)] for row, told in rows}
        return found

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Columns of the files, by the name of the image."""
        found: dict[str, dict[str, Any]] = {}
        for name, (path, _) in self.files().items():
            cells = _columns(Path(path), names)
            rows = enumerate(zip(*(cells[column] for column in names), strict=True))
            found |= {f"{name}/{row:09d}": dict(zip(names, told, strict=True)) for row, told in rows}
        return found

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The files, by their path from the folder on. Raises ValueError when there are none."""
        path = Path(self.path)
        folder = Path(*takewhile(lambda part: not set(part) & set("*?["), path.parts))
        if folder != path:
            found = sorted(folder.glob(str(path.relative_to(folder))))
        else:
            found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
            folder = path if path.is_dir() else path.parent
        found = [each for each in found if each.is_file()]
        if not found:
            raise ValueError(
                f"data.source.path: {self.path} names no file. Give a .parquet file, a folder or a pattern."
            )
        return {plain_text(each.relative_to(folder).as_posix()): (str(each), stamp_of(each)) for each in found}

    def _rows(self, path: Path) -> list[tuple[tuple[int, int], Any]]:
        """Of each row its row group, its place in that, and its class."""
        file = _open(path)
        _leaf(file, path, self.image_column)
        places = [
            (group, place)
            for group in range(file.metadata.num_row_groups)
            for place in range(file.metadata.row_group(group).num_rows)
        ]
        if self.label_column is None:
            return [(place, None) for place in places]
        return list(zip(places, _columns(path, (self.label_column,))[self.label_column], strict=True))


def _open(path: Path) -> Any:
    """The file's footer, and access to what it holds. Raises ValueError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs the package pyarrow. Install it.") from None
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not valid Parquet: {' '.join(str(error).split())}") from None


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """The cells of some columns. Raises ValueError."""
    file = _open(path)
    for name in names:
        _check_column(file, path, name)
    try:
        cells: dict[str, list[Any]] = file.read(columns=list(names)).to_pydict()
        return cells
    except Exception as error:  # Arrow's exceptions have no base but Exception and OSError
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def _leaf(file: Any, path: Path, column: str) -> str:
    """Where the bytes of the images lie: the column, or its field `bytes`. Raises ValueError."""
    import pyarrow.types

    _check_column(file, path, column)
    kind, leaf = file.schema_arrow.field(column).type, column
    if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, leaf = kind.field("bytes").type, f"{column}.bytes"
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise ValueError(
            f"{path}: column '{column}' is of type {file.schema_arrow.field(column).type}, not bytes of image files. "
            "Set data.source.image_column; a table of paths is read by data.source.type: table."
        )
    return leaf


def _check_column(file: Any, path: Path, name: str) -> None:
    if name not in file.schema_arrow.names:
        raise ValueError(f"{path} has no column '{name}'. Known: {', '.join(file.schema_arrow.names)}.")


@lru_cache(maxsize=1)
def _images(path: str, stamp: Stamp, group: int, column: str) -> Any:
    """The image files of a row group. stamp: of the file, so that another file of that name is read anew. Raises
    ValueError."""
    file = _open(Path(path))
    leaf = _leaf(file, Path(path), column)
    try:
        found = file.read_row_group(group, columns=[leaf]).column(0).combine_chunks()
    except Exception as error:  # Arrow's exceptions have no base but Exception and OSError
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    return found if leaf == column else found.field("bytes")
