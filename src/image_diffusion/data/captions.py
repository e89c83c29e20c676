"""Captions of images: made from their classes, read from a table, or such as come with the images.

An image may have several, or none. Who reads them says what becomes of an image without one (`data.pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from image_diffusion.core.config import Config
from image_diffusion.data.records import Sample
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.table import captions_of_rows, read_columns


class ClassCaptions(Config):
    """Captions for each class."""

    type: Literal["classes"] = "classes"
    """Captions made from class names."""
    template: str | tuple[str, ...] = "a photo of a {}"
    """The caption, with {} for the name of the class; or a list of them."""

    @field_validator("template")
    @classmethod
    def _names_the_class(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for each in several(value):
            if each.count("{}") != 1:
                raise ValueError(f"{each!r} must hold {{}} once, where the name of the class goes.")
        return value

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """The captions of each sample. Raises ValueError without classes."""
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
    """Name of the column of images, named as in the data set: the path within its folder, or tar and key."""
    caption_column: str | tuple[str, ...] = "caption"
    """Name of the column of captions; or a list of names, for several captions an image."""

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """The captions of each sample. Raises ValueError for a table that cannot be read."""
        known = _read(self.path, self.path_column, several(self.caption_column))
        return [known.get(sample.path, []) for sample in samples]


class BesideCaptions(Config):
    """Captions that come with the images."""

    type: Literal["beside"] = "beside"
    """For the sources folder and webdataset a `.txt` beside each image, a caption a line, or the key "caption" of a
    `.json`, as img2dataset writes them; for the sources table and huggingface a column of the same data."""
    column: str | tuple[str, ...] = "caption"
    """Name of that column; or a list of names, for several captions an image."""

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[list[str]]:
        """The captions of each sample. Raises ValueError for a source that has none, or one that cannot be read."""
        assert source is not None
        known = _beside(source, several(self.column))
        return [
            known.get(sample.path) or known.get(PurePosixPath(sample.path).with_suffix("").as_posix()) or []
            for sample in samples
        ]


Captions = Annotated[ClassCaptions | TableCaptions | BesideCaptions, Field(discriminator="type")]


def several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name or several -> several."""
    return (names,) if isinstance(names, str) else names


@lru_cache(maxsize=1)
def _beside(source: Source, columns: tuple[str, ...]) -> dict[str, list[str]]:
    return source.captions_beside(columns)


@lru_cache(maxsize=1)
def _read(path: str, path_column: str, caption_columns: tuple[str, ...]) -> dict[str, list[str]]:
    table = Path(path)
    if not table.is_file():
        raise ValueError(f"pairs.captions.path: {table} does not exist. Give a .csv or .parquet file.")
    return captions_of_rows(read_columns(table, path_column, *caption_columns), path_column, caption_columns)
