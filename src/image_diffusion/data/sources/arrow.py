"""Parquet and Arrow files: their reader, and the sources whose image files are in their columns, as on the Hugging Face
Hub. Needs the package pyarrow."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.files.atomic import Stamp, read_json, stamp_of
from image_diffusion.core.names import inside
from image_diffusion.core.process.errors import package
from image_diffusion.core.texts import class_in, class_name
from image_diffusion.data.sources.base import FewFiles, Item, Listing, RowSource, check_size, number_labels, plain_text
from image_diffusion.data.sources.layouts import named_files


@dataclass(frozen=True)
class ArrowTable:
    """An open file. sizes: rows of each group. read, read_group: read some columns, of all rows and of one group."""

    path: Path
    schema: Any
    sizes: list[int]
    read: Callable[[list[str]], Any]
    read_group: Callable[[int, list[str]], Any]

    def check_column(self, name: str) -> None:
        """Raise ValueError for a column that the file does not have."""
        if name not in self.schema.names:
            raise ValueError(f"{self.path} has no column '{name}'. Known: {', '.join(self.schema.names)}.")

    def columns(self, names: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the cells of some columns. Raises ValueError."""
        for name in names:
            self.check_column(name)
        try:
            cells: dict[str, list[Any]] = self.read(list(names)).to_pydict()
            return cells
        except Exception as error:  # Arrow's exceptions have no base but Exception and OSError
            raise ValueError(f"{self.path} is damaged: {' '.join(str(error).split())}") from None

    def group(self, number: int, column: str) -> Any:
        """Return a column of a group of rows. Raises ValueError."""
        try:
            return self.read_group(number, [column]).column(0)
        except Exception as error:
            raise ValueError(f"{self.path} is damaged: {' '.join(str(error).split())}") from None

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the class names in the file's metadata of `datasets`, by number; empty if there are none."""
        try:
            features = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
            return tuple(class_name(str(name)) for name in features[column]["names"])
        except (ValueError, KeyError, TypeError):
            return ()

    def check_images(self, column: str) -> None:
        """Raise ValueError unless a column holds image files: bytes, or structs with the field `bytes`."""
        import pyarrow.types

        self.check_column(column)
        kind = stored = self.schema.field(column).type
        if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
            raise ValueError(
                f"{self.path}: column '{column}' is of type {stored}, not bytes of image files. Set "
                "data.source.image_column; a table of paths is read by data.source.type: table."
            )


def open_table(path: str | Path) -> ArrowTable:
    """Open a `.arrow` file, a stream of record batches; any other file as Parquet. Raises ValueError."""
    try:
        import pyarrow  # noqa: F401 - imported here, since planning does not need it
    except ImportError:
        raise ValueError(f"{path}: reading Parquet and Arrow needs {package('pyarrow', 'workflow')}") from None
    try:
        return _open(Path(path), stamp_of(Path(path)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None


@lru_cache(maxsize=4)
def _open(path: Path, stamp: Stamp) -> ArrowTable:
    """Open a file. stamp: of the file, so that a replaced file is reopened."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".arrow":
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
            batches = table.to_batches()
            sizes = [len(batch) for batch in batches]
            return ArrowTable(path, table.schema, sizes, table.select, lambda i, names: batches[i].select(names))
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise ValueError(f"{path} is not valid {kind}: {' '.join(str(error).split())}") from None
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    return ArrowTable(path, file.schema_arrow, sizes, file.read, file.read_row_group)


class ImageTables(FewFiles, RowSource):
    """Tables with a column of image files, each as bytes or as a struct with the field `bytes`, and optionally a column
    of classes. Needs the package pyarrow.

    Names of classes are those that `datasets` noted in each file; without them the cells are the classes. Images are
    read one group of rows at a time, and never decoded twice.
    """

    type: str
    """Name of the source."""
    path: str = Field(min_length=1)
    """File or folder of the tables."""
    image_column: str = "image"
    """Name of the column of images."""
    label_column: str | None = "label"
    """Name of the column of classes, text or whole numbers; null for unconditional data."""

    no_image: ClassVar[str] = "the row holds no image"
    """Reason to quarantine a row without the bytes of an image."""

    @abstractmethod
    def tables(self) -> Iterator[tuple[ArrowTable, str, int]]:
        """Yield each table with the prefix of its image names and the number of its first row. Raises ValueError."""

    def listing(self) -> Listing:
        """Return every row as an image, in order. Raises ValueError for invalid files or columns."""
        rows = [row for table, prefix, start in self.tables() for row in self._items(table, prefix, start)]
        if not rows:
            raise ValueError(f"data.source.path: {self.path} has no rows. Give one row an image.")
        if self.label_column is None:
            return Listing([item for item, _ in rows], [], [])
        names = self._class_names()
        numbers = names or number_labels((label for _, label in rows if label is not None), self.path)
        items = [Item(item.name, numbers[label], item.address, item.group_key) for item, label in rows if label]
        return Listing(items, list(numbers), [(item.name, "no class") for item, label in rows if not label])

    def known_classes(self) -> list[str] | None:
        """Return the class names in the files, merged by name: the names of the first file in its order, then the new
        names of each further file. None if no file names classes, or the files cannot be read yet."""
        if self.label_column is None:
            return []
        try:
            return list(self._class_names() or ()) or None
        except ValueError:
            return None

    def read(self, item: Item) -> bytes:
        path, group, place = str(item.address[0]), int(item.address[1]), int(item.address[2])
        try:
            cell = _group(path, stamp_of(Path(path)), group, self.image_column)[place].as_py()
        except ValueError as error:
            raise OSError(str(error).replace(path, item.name.rpartition("/")[0] or Path(path).name)) from None
        data: bytes | None = cell["bytes"] if isinstance(cell, dict) else cell
        if data is None:
            raise OSError(self.no_image)
        check_size(len(data))
        return data

    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for table, prefix, start in self.tables():
            cells = table.columns(columns)
            for number, row in enumerate(zip(*(cells[column] for column in columns), strict=True), start):
                yield f"{prefix}{number:09d}", row

    def _class_names(self) -> dict[str, int] | None:
        """Return the number of each class that the files name; None if no file names classes. Raises ValueError."""
        assert self.label_column is not None
        # Merged by name: files of one data set may number the same classes differently.
        files = {table.path: table.class_names(self.label_column) for table, _, _ in self.tables()}
        named = [path for path, names in files.items() if names]
        unnamed = [path for path, names in files.items() if not names]
        if named and unnamed:
            raise ValueError(
                f"{named[0]} names the classes of column '{self.label_column}', but {unnamed[0]} has numbers without "
                f"names. Write all files with the same features, or set data.source.path to those that have them."
            )
        joined = dict.fromkeys(name for names in files.values() for name in names)
        return {name: number for number, name in enumerate(joined)} if named else None

    def _items(self, table: ArrowTable, prefix: str, start: int) -> Iterator[tuple[Item, str | None]]:
        """Yield each row of a table with the name of its class."""
        table.check_images(self.image_column)
        places = [(group, place) for group, size in enumerate(table.sizes) for place in range(size)]
        labels: list[str | None] = [None] * len(places)
        if self.label_column is not None:
            labels = [class_in(cell) for cell in table.columns((self.label_column,))[self.label_column]]
            if names := table.class_names(self.label_column):
                labels = [_name_of(label, names) for label in labels]
        for number, ((group, place), label) in enumerate(zip(places, labels, strict=True), start):
            address = str(table.path), group, place
            yield Item(f"{prefix}{number:09d}", None, address, f"{prefix}{group}" if prefix else ""), label


class Parquet(ImageTables):
    """Parquet files. An image is named by its file and row."""

    type: Literal["parquet"] = "parquet"
    """Parquet files that hold the images themselves."""
    path: str = Field(min_length=1)
    """A file, a folder (every `.parquet` in it is read; files of several splits are an error), or a pattern:
    `data/train-*.parquet`."""

    no_image: ClassVar[str] = (
        "the row holds no bytes of an image, at most its path; write the file with the images embedded"
    )

    def tables(self) -> Iterator[tuple[ArrowTable, str, int]]:
        for name, (path, _) in self.files().items():
            yield open_table(path), f"{name}/", 0

    def files(self) -> dict[str, tuple[str, Stamp]]:
        folder, paths = named_files(self.path, ".parquet")
        paths = [path for path in paths if path.is_file()]
        if not paths:
            raise ValueError(
                f"data.source.path: {self.path} names no file. Give a .parquet file, a folder or a pattern."
            )
        return {plain_text(path.relative_to(folder).as_posix()): (str(path), stamp_of(path)) for path in paths}


class HuggingFace(ImageTables):
    """A folder that `save_to_disk` of the package datasets wrote: one data set, or one of several splits.

    An image is named by its number, so appending images changes no other name.
    """

    type: Literal["huggingface"] = "huggingface"
    """A folder written by save_to_disk of the package datasets."""
    path: str = Field(min_length=1)
    """The folder."""
    split: str | None = None
    """Name of the split, if the folder holds several."""

    def tables(self) -> Iterator[tuple[ArrowTable, str, int]]:
        folder, start = self._folder(), 0
        try:
            names = [file["filename"] for file in read_json(folder / "state.json")["_data_files"]]
        except (KeyError, TypeError):
            raise ValueError(f"data.source.path: {folder}/state.json names no files. Save it again.") from None
        for name in names:
            table = open_table(inside(folder, name, follow=True))
            yield table, "", start
            start += sum(table.sizes)

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """Return the Arrow files, and the files that describe their columns. Raises ValueError when the folder has
        none."""
        folder = self._folder()
        paths = [*sorted(folder.glob("*.arrow")), folder / "dataset_info.json"]
        return {path.name: (str(path), stamp_of(path)) for path in paths if path.is_file()}

    def _folder(self) -> Path:
        """Return the folder of the chosen split. Raises ValueError."""
        folder = Path(self.path)
        if (folder / "dataset_dict.json").is_file():
            splits: list[str] = read_json(folder / "dataset_dict.json").get("splits", [])
            if self.split not in splits and not (self.split is None and len(splits) == 1):
                known = ", ".join(splits)
                raise ValueError(
                    f"data.source.split is {self.split}, but {folder} holds {known}. Set it to one of them."
                )
            return inside(folder, self.split or splits[0], follow=True)
        if not (folder / "state.json").is_file():
            raise ValueError(
                f"data.source.path: {folder} was not written by datasets.save_to_disk. Give such a folder."
            )
        if self.split is not None:
            raise ValueError(f"data.source.split is {self.split}, but {folder} has no splits. Leave it out.")
        return folder


def _name_of(label: str | None, names: tuple[str, ...]) -> str | None:
    """Return the name of a class by its number in the file; None for no number or a number without a name."""
    return names[int(label)] if label is not None and label.isdecimal() and int(label) < len(names) else None


@lru_cache(maxsize=1)
def _group(path: str, stamp: Stamp, number: int, column: str) -> Any:
    """Return the images of a group of rows. stamp: of the file, so that a replaced file is read again."""
    return open_table(path).group(number, column)
