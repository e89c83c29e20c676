"""Numbers of a set of crops, from columns of a table, for networks that are conditioned on numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from image_diffusion.core.files.atomic import digest
from image_diffusion.core.number_columns import NumberColumns, measured, number_in
from image_diffusion.data.encoded.pairs import PairSet
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import Quarantined, Sample, read_record
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import HasValues
from image_diffusion.data.sources.table import read_columns
from image_diffusion.systems.pairs.inputs import JoinedPairs, PairInputs

LABEL = "label"
"""Name of the class in rows of conditions (sample.conditions), which no column may have."""
_OF_REQUESTS = frozenset({"class", "image", "prompt", "seed"})
"""Names of other columns in requests to a model."""

Row = Mapping[str, float | None]


class NumberPairs(JoinedPairs):
    """Numbers of the images, stored next to the latents."""

    kind: ClassVar[str] = "numbers"
    condition: ClassVar[str] = "numbers"
    dtype: ClassVar[Literal["float32"]] = "float32"
    """Data type of the stored numbers."""
    type: Literal["numbers"] = "numbers"
    """Numbers of the crops; for system.condition numbers."""
    columns: tuple[str, ...] = Field(min_length=1)
    """Names of the columns, each with a number for each image. Empty cells and NaN are missing values; true and false
    are 1 and 0, so that such columns can give an image several labels."""
    table: str | None = None
    """The table: `.csv` or `.tsv` with a header line, `.jsonl` or `.parquet`, one row per image. Unset: the columns
    come with the images: in a table, in Parquet or Hugging Face files, or in a `.json` file for each image."""
    path_column: str = "path"
    """Column of the table with the image's name in the data set: the path within its folder, or tar and key."""

    @field_validator("columns")
    @classmethod
    def _apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"{twice} is named twice. Name each column once.")
        if LABEL in value:
            raise ValueError(f"{LABEL} is the name of an image's class. Rename the column.")
        if taken := sorted(_OF_REQUESTS.intersection(value)):
            raise ValueError(f"{taken[0]} is the name of another column of a request. Rename the column.")
        return value

    @property
    def needs_source(self) -> bool:
        return self.table is None

    @property
    def other_files(self) -> str | None:
        return self.table

    def check(self, source: Source) -> None:
        """Raise ValueError if the columns come with the images, and the source has none."""
        if self.table is None and not isinstance(source, HasValues):
            raise ValueError(
                f"pairs.table is unset, but data.source.type: {source.type} has no values beside the images. Name a "
                f"table of numbers: pairs: {{type: numbers, columns: [...], table: FILE.csv}}."
            )

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None:
            raise ValueError("Numbers are those of crops: give --data.")
        return Numbers(inputs.crops, self.columns, self._cells(inputs.source))

    def _cells(self, source: Source | None) -> dict[str, dict[str, Any]]:
        """Return the cells of each row by column, by the name of the image."""
        if self.table is None:
            assert source is not None
            self.check(source)
            assert isinstance(source, HasValues)
            values = source.read_values(self.columns)
            if not any(values.values()):
                raise ValueError(
                    f"pairs.columns: no image has a value of {', '.join(self.columns)} beside it. Name columns or keys "
                    f"of the data set."
                )
            return values
        table = Path(self.table)
        if not table.is_file():
            raise ValueError(f"pairs.table: {table} does not exist. Give a .csv, .tsv, .jsonl or .parquet file.")
        columns = read_columns(table, self.path_column, *self.columns)
        cells: dict[str, dict[str, Any]] = {}
        for row, name in enumerate(columns[self.path_column]):
            if name in cells:
                raise ValueError(f"pairs.table: {table} has two rows for {name}. Give one row an image.")
            cells[name] = {column: columns[column][row] for column in self.columns}
        return cells


class Numbers(PairSet):
    """Numbers [columns, 2] of each crop that has a row: the value, on the scale of the ranges of the training split,
    and 1; both are 0 for a missing number. One shard for each shard of crops."""

    kind: ClassVar = "numbers"

    def __init__(self, crops: Path, names: tuple[str, ...], cells: Mapping[str, Mapping[str, Any]]) -> None:
        shards = open_shards(crops, "all")
        self.num_shards, self.num_rows = len(shards.manifest["shards"]), shards.num_samples
        self._samples, self._rows = list[list[Sample]](), list[list[Row]]()
        self._missing = list[list[Quarantined]]()
        trained_on, held_out, first = list[Row](), shards.held_out(), 0
        for shard in range(self.num_shards):
            samples, rows, missing = list[Sample](), list[Row](), list[Quarantined]()
            for number, sample in enumerate(read_record(crops, shard).samples, first):
                of_image = cells.get(sample.path) or cells.get(sample.path.rpartition(".")[0])
                if of_image is None:
                    missing.append(Quarantined(sample.path, "it has no row of numbers", sample.sha256))
                    continue
                samples.append(sample)
                rows.append(_numbers(of_image, names, sample.path))
                if not held_out[number]:
                    trained_on.append(rows[-1])
            first += len(samples) + len(missing)
            self._samples.append(samples)
            self._rows.append(rows)
            self._missing.append(missing)
        if not trained_on:
            raise ValueError(
                "pairs.columns: no training image has a row of numbers. Name the images in the table as the data set "
                "does: by their path within its folder."
            )
        self._columns: NumberColumns = measured(names, trained_on)
        self.missing_numbers = self._columns.missing
        self.shape = (len(names), 2)
        ranges = [list(ends) for ends in self._columns.ranges]
        self.identity: dict[str, Any] = {"columns": list(names), "ranges": ranges}

    def samples(self, shard: int) -> list[Sample]:
        """Return the crops that have a row: their ids are the hashes of the images."""
        return self._samples[shard]

    def missing(self, shard: int) -> list[Quarantined]:
        """Return the crops without a row."""
        return self._missing[shard]

    def made_from(self, shard: int) -> str:
        """Return the digest of the numbers and of their images' hashes."""
        images = [sample.sha256 for sample in self._samples[shard]], [sample.path for sample in self._missing[shard]]
        return digest([images, self._rows[shard]])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return the numbers of some crops, float32 [n, columns, 2]."""
        return self._columns.scaled(self._rows[shard][start:stop]).numpy()


def _numbers(cells: Mapping[str, Any], names: tuple[str, ...], image: str) -> Row:
    row: dict[str, float | None] = {}
    for name in names:
        try:
            row[name] = number_in(cells.get(name))
        except ValueError as error:
            raise ValueError(
                f"pairs.columns: {name} of {image}: {error}. Give a number, or leave the cell empty."
            ) from None
    return row
