"""Data sets as `save_to_disk` of the package datasets writes them, for tests without that package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def save_to_disk(folder: Path, columns: dict[str, list[Any]], num_files: int = 1, batch: int | None = None) -> None:
    """Write the files of `datasets`, as far as they are read."""
    folder.mkdir(exist_ok=True)
    table = pa.table(columns)
    size = -(-len(table) // num_files)
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    for number, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table.slice(number * size, size), max_chunksize=batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
