"""Configuration section `data`: the source of the images and their preparation for training."""

from __future__ import annotations

import math
import re
from ctypes import c_float
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from image_diffusion.core.config.base import Sparse
from image_diffusion.core.levels import DType
from image_diffusion.core.resolution import Resolution, height_width, size_text
from image_diffusion.data.crop.filter_expression import Rule, parse_rule
from image_diffusion.data.crop.methods import AdmCrop, AnyCrop
from image_diffusion.data.sources import Source

WHITE = (255, 255, 255)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._]*$"

MOST_CHANNELS = 64
"""Channels that an array may have."""


def _channels(value: Any) -> Any:
    names = value.values() if isinstance(value, dict) else value
    if type(value) is int:
        is_right = 1 <= value <= MOST_CHANNELS
    else:
        is_right = (
            isinstance(value, list | tuple | dict)
            and 1 <= len(value) <= MOST_CHANNELS
            and all(isinstance(name, str) and name for name in names)
            and (not isinstance(value, dict) or all(type(place) is int and place >= 0 for place in value))
        )
    if not is_right:
        raise ValueError(
            f"got {value!r}; expected a number from 1 to {MOST_CHANNELS}, names, or names by place. Use 3, [dapi, "
            "actin], or {0: dapi, 3: actin}."
        )
    if type(value) is not int and len({*names}) < len(value):
        raise ValueError(f"{list(names)} has a name twice. Give each channel its own.")
    return value


Channels = Annotated[int | tuple[str, ...] | dict[int, str], BeforeValidator(_channels)]
Range = Literal["file", "measured"] | tuple[float, float]


def _width(low: float, high: float) -> float:
    """Return high - low in float32: 0 if both round to the same number, infinite or NaN if one is out of range."""
    return c_float(c_float(high).value - c_float(low).value).value


class DataConfig(Sparse):
    """Preparation of images as crops."""

    if_set: ClassVar[frozenset[str]] = frozenset({"dtype", "axes"})

    name: str = Field(pattern=_NAME)
    """Name of the data set, the start of its folder's name: letters, digits, dots and underscores."""
    source: Source
    """Source of the images."""
    resolution: Resolution
    """Side of a crop in pixels; or [height, width]."""
    dtype: DType | None = None
    """Type of the numbers of array images, which keep their values: 12 bits in uint16, Hounsfield units in int16.
    Unset: images are pictures, read with 8 bits per channel."""
    channels: Channels = 3
    """Channels of a crop. Pictures: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha. Arrays: the number of channels,
    up to 64; or their names, [dapi, actin], which select channels if the files name them, and otherwise name all
    channels in order; or the names of selected channels by index, {0: dapi, 3: actin}."""
    axes: str | None = Field(default=None, pattern=r"^[A-Z]{2,8}$")
    """Axes of arrays, one letter each: C channel, Y row, X column; `pages` selects along any other axis. Unset: as the
    file states, or as follows from the number of channels."""
    crop: AnyCrop = AdmCrop()
    """Method that gives an image the shape of a crop."""
    background: tuple[int, int, int] | None = None
    """RGB colour, 0 to 255, of bars, and of the background behind transparent pixels if the crops have no alpha
    channel. Unset: white, and an error if every image has an alpha channel."""
    range: Range | dict[str, Range] | None = None
    """Values of black and white in pictures of more than 8 bits. file: 0 and the value that the file states, or else
    the largest value of its type. [low, high]: these two, in grey images; values outside are clipped. Unset: as file,
    with an error if the range is doubtful: the images use a small part of it, or 8 and 16 bits are mixed. For arrays:
    the values that the network sees as -1 and 1, for all channels or for each by name. measured (default): quantiles
    0.0001 and 0.9999 of each channel, close to its minimum and maximum. file: the minimum and maximum of the type."""
    pages: Literal["first", "all"] | None = None
    """Pages to read from a file with several: the pages of a TIFF, or the indices along array axes such as Z and T.
    first: the first page. all: for arrays, each page is an image; all pages of a file share a split. Unset:
    such a file is an error."""
    profile: Literal["ignore", "convert"] = "ignore"
    """Treatment of a colour profile other than sRGB. ignore: read the values in the file as sRGB, as ADM, DiT and EDM2
    do. convert: convert to sRGB."""
    min_side: int = Field(default=1, ge=1)
    """Images whose shorter side is less than this many pixels are quarantined."""
    max_pixels: int = Field(default=90_000_000, ge=1)
    """Images of more pixels than this are quarantined before they are decoded."""
    max_bad_fraction: float = Field(default=0.1, ge=0, le=1)
    """Largest share of the files that may be quarantined; above it, the stage stops."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the images kept for validation, chosen by the hash of their content: stable when images are added. An
    image with a near duplicate in the training split is moved to the training split."""
    held_out: list[str] = Field(default_factory=list, max_length=100)
    """Name patterns of the images that are kept for validation, in place of a share: `[val/*]` for a folder `val` in
    the source. `*` matches any characters, including "/"."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Treatment of images with byte-identical crops. drop: keep the first by name, whatever the classes of the others,
    which are listed in quarantine.csv."""
    keep: str | None = Field(default=None, max_length=1000)
    """Filter rule over the metadata of the images: columns of a table, of Parquet or Hugging Face files, or keys of a
    `.json` file next to each image. Images that fail the rule or lack a value are not read; they are listed in
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
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, tuple) and not -math.inf < part[0] < part[1] < math.inf:
                raise ValueError(f"{list(part)} is not a range. Give two numbers, the smaller one first.")
        return value

    @model_validator(mode="after")
    def _pictures_or_arrays(self) -> DataConfig:
        if self.dtype is None:
            if not isinstance(self.channels, int) or self.channels > 4:
                raise ValueError(
                    f"channels is {_plain(self.channels)}, but pictures have 1 to 4. Set dtype to the type of your "
                    "arrays: uint8, uint16, int16 or float32."
                )
            for name, value in {"axes": self.axes, "range": self.range, "pages": self.pages}.items():
                if value in ("measured", "all") or isinstance(value, dict) or (name == "axes" and value is not None):
                    raise ValueError(
                        f"{name} is {_plain(value)}, which is for arrays. Set dtype to the type of yours, or leave "
                        f"{name} out."
                    )
            return self
        if isinstance(self.range, dict) and (unknown := self.range.keys() - {*self.channel_names}):
            raise ValueError(
                f"range names {min(unknown)!r}, which is no channel. Known: {', '.join(self.channel_names)}."
            )
        ranges = self.range.values() if isinstance(self.range, dict) else [self.range]
        if self.dtype == "float32" and "file" in ranges:
            raise ValueError("range is file, but float32 has no largest number. Use measured, or two numbers.")
        for part in ranges:
            if isinstance(part, tuple) and not 0 < _width(*part) < math.inf:
                raise ValueError(
                    f"{list(part)} is no range in float32, in which a network sees arrays. Give two numbers further "
                    "apart, less than 3.4e38 in all."
                )
        if self.crop.type == "pad":
            raise ValueError("crop.type is pad, but bars have no number in arrays. Choose another crop.")
        return self

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
        side = self.resolution if isinstance(self.resolution, int) else size_text(self.resolution).replace(" ", "")
        return f"{self.name}-{side}"

    @property
    def num_channels(self) -> int:
        """Return the number of channels of a crop."""
        return self.channels if isinstance(self.channels, int) else len(self.channels)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Return the names of the channels of arrays; numbers from 0 if the configuration gives no names."""
        if isinstance(self.channels, int):
            return tuple(map(str, range(self.channels)))
        return tuple(self.channels.values() if isinstance(self.channels, dict) else self.channels)

    @property
    def channel_ranges(self) -> dict[str, Range]:
        """Return the range of each channel of arrays by its name; "measured" unless it is stated."""
        stated = self.range if isinstance(self.range, dict) else dict.fromkeys(self.channel_names, self.range)
        return {name: stated.get(name) or "measured" for name in self.channel_names}

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and the width of a crop in pixels."""
        return height_width(self.resolution)

    @property
    def crop_shape(self) -> tuple[int, int, int]:
        """Return the shape of a crop, (channels, height, width)."""
        return self.num_channels, *self.size

    @property
    def rule(self) -> Rule | None:
        """Return the rule that the images to keep meet; None if all are kept."""
        return None if self.keep is None else parse_rule(self.keep)

    def crop_identity(self) -> dict[str, Any]:
        """Return all settings that decide the pixels of a crop. Crops with different identities are never mixed."""
        changed = {
            "range": list(self.range) if isinstance(self.range, tuple) and self.dtype is None else None,
            "dtype": self.dtype,
            "axes": self.axes,
            "pages": self.pages,
            "profile": self.profile if self.profile != "ignore" else None,
        }
        return {
            **self.crop.identity(),
            "version": 1,
            "resolution": self.resolution if isinstance(self.resolution, int) else list(self.resolution),
            "channels": _plain(self.channels),
            "resize": "exact",
            "background": list(self.background or WHITE),
            "min_side": self.min_side,
            "max_pixels": self.max_pixels,
            **{name: value for name, value in changed.items() if value is not None},
        }


def _plain(value: Any) -> Any:
    """Return a configuration value as it is written in a file: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value
