"""Captions of images: made from their classes, read from a table, or from files beside the images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from image_diffusion.core.config import Config
from image_diffusion.data.records import Sample
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.table import read_columns
from image_diffusion.data.sources.webdataset import Webdataset


class ClassCaptions(Config):
    """A caption for each class."""

    type: Literal["classes"] = "classes"
    """Captions made from class names."""
    template: str = "a photo of a {}"
    """The caption, with {} for the name of the class."""

    @field_validator("template")
    @classmethod
    def _names_the_class(cls, value: str) -> str:
        if value.count("{}") != 1:
            raise ValueError(f"{value!r} must hold {{}} once, where the name of the class goes.")
        return value

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[str]:
        """The caption of each sample. Raises ValueError without classes."""
        if not classes:
            raise ValueError(
                "pairs.captions.type is classes, but the data have no classes. Put images into class folders, or set "
                "it to beside or table."
            )
        names = [self.template.replace("{}", name.replace("_", " ")) for name in classes]
        return [names[sample.label or 0] for sample in samples]


class TableCaptions(Config):
    """Captions from a CSV or Parquet file."""

    type: Literal["table"] = "table"
    """Captions from a table."""
    path: str = Field(min_length=1)
    """The table: `.csv` with a header line, or `.parquet`."""
    path_column: str = "path"
    """Name of the column of images, named as in the data set: the path within its folder, or tar and key."""
    caption_column: str = "caption"
    """Name of the column of captions."""

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[str]:
        """The caption of each sample. Raises ValueError, naming the first, where one is missing."""
        known = _read(self.path, self.path_column, self.caption_column)
        return _complete([known.get(sample.path) for sample in samples], samples, self.path)


class BesideCaptions(Config):
    """Captions in files beside the images, as img2dataset writes them."""

    type: Literal["beside"] = "beside"
    """A `.txt` beside each image, or the key "caption" of a `.json`; for the sources folder and webdataset."""

    def of(self, samples: Sequence[Sample], classes: Sequence[str], source: Source | None) -> list[str]:
        """The caption of each sample. Raises ValueError, naming the first, where one is missing."""
        if not isinstance(source, Folder | Webdataset):
            raise ValueError(
                "pairs.captions.type is beside, but only the sources folder and webdataset have files beside their "
                "images. Set it to classes or table."
            )
        known = _beside(source)
        found = [
            known.get(sample.path, known.get(PurePosixPath(sample.path).with_suffix("").as_posix()))
            for sample in samples
        ]
        return _complete(found, samples, source.path)


Captions = Annotated[ClassCaptions | TableCaptions | BesideCaptions, Field(discriminator="type")]


def _complete(captions: list[str | None], samples: Sequence[Sample], where: str) -> list[str]:
    """The captions, if there is one for each sample."""
    missing = [sample.path for sample, caption in zip(samples, captions, strict=True) if caption is None]
    if missing:
        raise ValueError(
            f"{where} has no caption for {len(missing):,} of {len(samples):,} images, the first is {missing[0]}. Give "
            f"every image a caption, or take it out of the data set."
        )
    return [caption for caption in captions if caption is not None]


@lru_cache(maxsize=1)
def _beside(source: Folder | Webdataset) -> dict[str, str]:
    return source.captions()


@lru_cache(maxsize=1)
def _read(path: str, path_column: str, caption_column: str) -> dict[str, str]:
    table = Path(path)
    if not table.is_file():
        raise ValueError(f"pairs.captions.path: {table} does not exist. Give a .csv or .parquet file.")
    columns = read_columns(table, path_column, caption_column)
    rows = zip(columns[path_column], columns[caption_column], strict=True)
    return {path: caption for path, caption in rows if caption.strip()}
