"""Captions of images: made from their classes, read from a table, or stored with the images.

`CaptionedCrops` reads them beside the crops of a set, shard by shard. An image may have several, or none. The reader
decides on an image without one (`data.pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import Quarantined, Sample, read_record
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import captions_of
from image_diffusion.data.sources.table import read_columns


class ClassCaptions(Config):
    """Captions for each class."""

    type: Literal["classes"] = "classes"
    """Captions made from class names."""
    table: ClassVar[None] = None
    """The table that is read; None: there is none."""
    template: str | tuple[str, ...] = "a photo of a {}"
    """Template of a caption, with {} for the name of the class; or a list of templates."""

    @field_validator("template")
    @classmethod
    def _names_the_class(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for template in several(value):
            if template.count("{}") != 1:
                raise ValueError(f"{template!r} must hold {{}} once, where the name of the class goes.")
        return value

    def read(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """Return the captions of each sample. Raises ValueError if there are no classes."""
        if not classes:
            raise ValueError(
                "pairs.captions.type is classes, but the data have no classes. Put images into class folders, or set "
                "it to beside or table."
            )
        names = [
            [template.replace("{}", name.replace("_", " ")) for template in several(self.template)] for name in classes
        ]
        return [names[sample.label or 0] for sample in samples]


class TableCaptions(Config):
    """Captions from a CSV or Parquet file."""

    type: Literal["table"] = "table"
    """Captions from a table."""
    path: str = Field(min_length=1)
    """The table: `.csv` with a header line, or `.parquet`. An image may have several rows."""
    path_column: str = "path"
    """Name of the column of image names as in the data set: the path within its folder, or tar and key."""
    caption_column: str | tuple[str, ...] = "caption"
    """Name of the column of captions; or a list of names, for several captions per image."""

    @property
    def table(self) -> str:
        """Return the table that is read."""
        return self.path

    def read(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """Return the captions of each sample. Raises ValueError for a table that cannot be read."""
        known = _read(self.path, self.path_column, several(self.caption_column))
        return [known.get(sample.path, []) for sample in samples]


class BesideCaptions(Config):
    """Captions that come with the images."""

    type: Literal["beside"] = "beside"
    """Captions in the source. folder and webdataset: a `.txt` next to each image, one caption per line, or the key
    "caption" of a `.json`, as img2dataset writes them. table and huggingface: a column of the same data."""
    table: ClassVar[None] = None
    """The table that is read; None: there is none."""
    column: str | tuple[str, ...] = "caption"
    """Name of the column of captions; or a list of names, for several captions per image."""

    def read(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """Return the captions of each sample. Raises ValueError for a source that has none, or one that cannot be
        read."""
        assert source is not None
        return read_captions(source, several(self.column), [sample.path for sample in samples])


Captions = Annotated[ClassCaptions | TableCaptions | BesideCaptions, Field(discriminator="type")]


def several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else names


def read_captions(source: Source, columns: tuple[str, ...], names: Sequence[str]) -> list[list[str]]:
    """Return the captions that come with the images of these names. Raises ValueError for a source that has none, or
    one that cannot be read."""
    known = _caption_columns(source, columns)
    # Tables name files with their suffix, webdataset's members without it.
    return [known.get(name) or known.get(PurePosixPath(name).with_suffix("").as_posix()) or [] for name in names]


@lru_cache(maxsize=1)
def _caption_columns(source: Source, columns: tuple[str, ...]) -> dict[str, list[str]]:
    return source.read_captions(columns)


@lru_cache(maxsize=1)
def _read(path: str, path_column: str, caption_columns: tuple[str, ...]) -> dict[str, list[str]]:
    table = Path(path)
    if not table.is_file():
        raise ValueError(f"pairs.captions.path: {table} does not exist. Give a .csv or .parquet file.")
    cells = read_columns(table, path_column, *caption_columns)
    return captions_of(
        zip(cells[path_column], zip(*(cells[name] for name in caption_columns), strict=True), strict=True)
    )


@dataclass(frozen=True)
class Captioned:
    """The crops of a shard that have captions.

    samples, captions, rows: record, captions (at least one), and number in the whole set, of each crop. missing: crops
    without captions. first_captions: of all crops of the shard; None for those without. sha256: of the shard.
    """

    samples: list[Sample]
    captions: list[list[str]]
    rows: NDArray[np.int64]
    missing: list[Quarantined]
    first_captions: list[str | None]
    sha256: str


class CaptionedCrops:
    """Every shard of a set of crops, with captions. source: source of the images and of the captions that come with
    them.

    shape: of a crop, [C, R, R]. held_out: whether the set keeps each crop from training, bool [N].
    """

    def __init__(self, folder: Path, captions: Captions, source: Source | None) -> None:
        self._folder, self._shards = folder, open_shards(folder, "all", renders=True)
        self._captions, self._source = captions, source
        self._entries = self._shards.manifest["shards"]
        self.shape, self.held_out = self._shards.shape, self._shards.held_out()
        counts = [entry["num_samples"] for entry in self._entries]
        self.num_shards, self.num_crops = len(counts), sum(counts)
        self._first = [sum(counts[:shard]) for shard in range(len(counts))]
        self._last: tuple[int, Captioned] | None = None

    def shard(self, shard: int) -> Captioned:
        """Read one shard; the last one is kept in memory."""
        if self._last is None or self._last[0] != shard:
            self._last = shard, self._read(shard)
        return self._last[1]

    def _read(self, shard: int) -> Captioned:
        samples = read_record(self._folder, shard).samples
        captions = self._captions.read(samples, self._shards.classes, self._source)
        has = [row for row, texts in enumerate(captions) if texts]
        return Captioned(
            [samples[row] for row in has],
            [captions[row] for row in has],
            np.array(has, dtype=np.int64) + self._first[shard],
            [
                Quarantined(sample.path, "it has no caption", sample.sha256)
                for sample, texts in zip(samples, captions, strict=True)
                if not texts
            ],
            [texts[0] if texts else None for texts in captions],
            self._entries[shard]["sha256"],
        )

    def images(self, rows: NDArray[np.int64]) -> Tensor:
        """Return crops by number, [B, C, H, W]: pictures as uint8, arrays as float32 from 0 to 255."""
        return self._shards.gather(rows)
