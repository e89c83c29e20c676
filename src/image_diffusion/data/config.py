"""Data section: which images, and how they are prepared for training."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Resolution, height_width, shown
from image_diffusion.data.crop import AnyCrop
from image_diffusion.data.crop.adm import AdmCrop
from image_diffusion.data.crop.filter_expression import parse_rule
from image_diffusion.data.sources import Source

WHITE = (255, 255, 255)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._]*$"


class DataConfig(Config):
    """Preparation of images as crops."""

    name: str = Field(pattern=_NAME)
    """Name of the data set, the start of its folder's name: letters, digits, dots and underscores."""
    source: Source
    """Source of the images."""
    resolution: Resolution
    """Side of a crop in pixels; or [height, width]."""
    channels: Literal[1, 2, 3, 4] = 3
    """Channels of a crop: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha."""
    crop: AnyCrop = AdmCrop()
    """Method that gives an image the shape of a crop."""
    background: tuple[int, int, int] | None = None
    """RGB colour, 0 to 255, of bars, and of the background of transparent pixels when the crops have no alpha channel.
    Unset: white, and an error when every image has an alpha channel."""
    range: Literal["file"] | tuple[float, float] | None = None
    """Numbers of black and white in images of more than 8 bits. file: 0 and what the file states, or else the largest
    number of its type. [low, high]: these two, in grey images; what lies outside is clipped. Unset: as file, and an
    error where that is doubtful: the images use a small part of the range, or 8 and 16 bits are mixed."""
    pages: Literal["first"] | None = None
    """Page that is taken of a TIFF of several pages. first: the first page. Unset: such a file is an error."""
    profile: Literal["ignore", "convert"] = "ignore"
    """Treatment of a colour profile other than sRGB. ignore: the numbers of the file are taken as sRGB, as ADM, DiT and
    EDM2 do. convert: to sRGB."""
    min_side: int = Field(default=1, ge=1)
    """Images whose shorter side is less than this many pixels are quarantined."""
    max_pixels: int = Field(default=90_000_000, ge=1)
    """Images of more pixels than this are quarantined before they are decoded."""
    max_bad_fraction: float = Field(default=0.1, ge=0, le=1)
    """The largest share of the files that may be quarantined; above it the stage stops."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the images kept for validation, chosen by the hash of their content: stable when images are added. Those
    of which a near duplicate is trained on are trained on, too."""
    held_out: list[str] = Field(default_factory=list, max_length=100)
    """Patterns of the names of images that are kept for validation, in place of a share: `[val/*]` for a folder `val`
    in the source. `*` matches any characters, "/" among them."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Treatment of images whose crops are the same byte for byte. drop: the first by name stays, whatever the class of
    the others; those are listed in quarantine.csv."""
    keep: str | None = Field(default=None, max_length=1000)
    """Rule over the values beside the images: columns of a table, of Parquet or Hugging Face files, keys of a `.json`
    beside each image. Images of which it does not hold, or which lack a value, are not read; they are listed in
    quarantine.csv. Example: `aesthetic > 5 and width >= 256 and language in ("en", "de")`."""
    num_shards: int = Field(default=16, ge=1, le=99_999)
    """Number of shards. An image's path decides its shard, so changing one image rewrites one shard."""

    @model_validator(mode="before")
    @classmethod
    def _resize_was_removed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "resize" in data:
            raise ValueError(f"resize: {data['resize']} was removed. Crops are always exact. Delete the key resize.")
        return data

    @field_validator("name", mode="before")
    @classmethod
    def _begins_a_folder_name(cls, value: Any) -> Any:
        fitting = re.sub(r"[^A-Za-z0-9._]", "_", str(value)).lstrip("._") or "images"
        if not re.match(_NAME, str(value)):
            raise ValueError(
                f"{str(value)!r} cannot name a data set. Use letters, digits, dots and underscores (a hyphen parts the "
                f"name from the resolution in results/datasets/<name>-<resolution>): {fitting}."
            )
        return value

    @field_validator("keep")
    @classmethod
    def _is_a_rule(cls, value: str | None) -> str | None:
        if value is not None:
            parse_rule(value)
        return value

    @field_validator("background")
    @classmethod
    def _colour(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value is not None and not all(0 <= level <= 255 for level in value):
            raise ValueError(f"{list(value)} is not a colour. Give red, green and blue from 0 to 255.")
        return value

    @field_validator("range")
    @classmethod
    def _is_a_range(cls, value: Any) -> Any:
        if isinstance(value, tuple) and not -math.inf < value[0] < value[1] < math.inf:
            raise ValueError(f"{list(value)} is not a range. Give two numbers, the smaller one first.")
        return value

    @model_validator(mode="after")
    def _one_split(self) -> DataConfig:
        if self.held_out and self.validation_fraction:
            raise ValueError("held_out and validation_fraction both choose the images for validation. Set one of them.")
        return self

    @property
    def has_validation(self) -> bool:
        """True if images are kept for validation."""
        return bool(self.held_out) or self.validation_fraction > 0

    @property
    def folder(self) -> str:
        """Name of the data set's folder under results/datasets."""
        side = self.resolution if isinstance(self.resolution, int) else shown(self.resolution).replace(" ", "")
        return f"{self.name}-{side}"

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and the width of a crop in pixels."""
        return height_width(self.resolution)

    def crop_identity(self) -> dict[str, Any]:
        """Return everything that decides the pixels of a crop. Crops of another identity are never mixed with these."""
        changed = {
            "range": list(self.range) if isinstance(self.range, tuple) else None,
            "pages": self.pages,
            "profile": self.profile if self.profile != "ignore" else None,
        }
        return {
            **self.crop.identity(),
            "version": 1,
            "resolution": self.resolution if isinstance(self.resolution, int) else list(self.resolution),
            "channels": self.channels,
            "resize": "exact",
            "background": list(self.background or WHITE),
            "min_side": self.min_side,
            "max_pixels": self.max_pixels,
            **{name: value for name, value in changed.items() if value is not None},
        }
