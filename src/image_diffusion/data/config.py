"""The data section: which images, and what becomes of them before training."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from image_diffusion.core.config import Config
from image_diffusion.data.crops import AnyCrop
from image_diffusion.data.crops.adm import AdmCrop
from image_diffusion.data.rules import parse_rule
from image_diffusion.data.sources import Source

WHITE = (255, 255, 255)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._]*$"


class DataConfig(Config):
    """From images to crops."""

    name: str = Field(pattern=_NAME)
    """Name of the data set, the start of its folder's name: letters, digits, dots and underscores."""
    source: Source
    """Where the images come from."""
    resolution: int = Field(ge=1, le=4096)
    """Side of a crop in pixels."""
    channels: Literal[1, 2, 3, 4] = 3
    """Channels of a crop: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha."""
    crop: AnyCrop = AdmCrop()
    """How an image becomes a square."""
    resize: Literal["exact", "fast"] = "exact"
    """exact: the bytes of the original ADM crop. fast: torch's uint8 kernel, at most 2 of 255 off.
    For the crop adm."""
    background: tuple[int, int, int] | None = None
    """RGB colour, 0 to 255, of bars, and put behind transparent pixels when the crops have no alpha channel. Unset:
    white, and an error when every image has an alpha channel."""
    min_side: int = Field(default=1, ge=1)
    """Images whose shorter side is less than this many pixels are quarantined."""
    max_pixels: int = Field(default=90_000_000, ge=1)
    """Images of more pixels than this are quarantined before they are decoded."""
    max_bad_fraction: float = Field(default=0.1, ge=0, le=1)
    """The largest share of the files that may be quarantined; above it the stage stops."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the images kept for validation, chosen by the hash of their content: stable when images are added. Those
    of which a near duplicate is trained on are trained on, too."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What becomes of images whose crops are the same byte for byte. drop: the first by name stays, whatever the class
    of the others; those are listed in quarantine.csv."""
    keep: str | None = Field(default=None, max_length=1000)
    """A rule over what is told beside the images: columns of a table, of Parquet or Hugging Face files, keys of a
    `.json` beside each image. Images of which it does not hold, or which lack a value, are not read; they are listed in
    quarantine.csv. Example: `aesthetic > 5 and width >= 256 and language in ("en", "de")`."""
    num_shards: int = Field(default=16, ge=1, le=99_999)
    """Number of shards. An image's path decides its shard, so changing one image rewrites one shard."""

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
        if value is not None and not all(0 <= each <= 255 for each in value):
            raise ValueError(f"{list(value)} is not a colour. Give red, green and blue from 0 to 255.")
        return value

    @model_validator(mode="after")
    def _fast_is_of_adm(self) -> DataConfig:
        if self.resize == "fast" and self.crop.type != "adm":
            raise ValueError(f"resize: fast is of the crop adm; data.crop is {self.crop.type}. Set resize to exact.")
        return self

    @property
    def folder(self) -> str:
        """Name of the data set's folder under results/datasets."""
        return f"{self.name}-{self.resolution}"

    def crop_identity(self) -> dict[str, Any]:
        """Everything that decides the pixels of a crop. Crops of another identity are never mixed with these."""
        return {
            **self.crop.identity(),
            "version": 1,
            "resolution": self.resolution,
            "channels": self.channels,
            "resize": self.resize,
            "background": list(self.background or WHITE),
            "min_side": self.min_side,
            "max_pixels": self.max_pixels,
        }
