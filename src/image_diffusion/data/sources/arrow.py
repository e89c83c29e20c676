"""Read Parquet and Arrow files: their columns, and one group of rows at a time. Needs the package pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import Stamp, stamp_of
from image_diffusion.core.process.errors import package
from image_diffusion.core.texts import class_name


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
