"""Manifest of a set of shards, whose values are validated like a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from image_diffusion.core.config.base import Config, parse
from image_diffusion.core.levels import Levels
from image_diffusion.core.names import Hashes, Sha256, TarName
from image_diffusion.data.shards.records import FORMAT
from image_diffusion.data.shards.tar_layout import MAX_SAMPLES, Layout

Number = Annotated[float, Field(allow_inf_nan=False)]


class Shard(Config):
    """One shard."""

    file: TarName
    """File name of the tar, in the folder of the manifest."""
    sha256: Sha256
    """The sha256 of the tar."""
    bytes: int = Field(ge=0, lt=2**48)
    """Size of the tar in bytes."""
    num_samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of samples in the tar."""


class Declared(Config):
    """Normalisation factors of an autoencoder's author: x = (latent - mean) / std."""

    mean: list[Number] = Field(min_length=1)
    """Mean of each channel, or one value for all."""
    std: list[Annotated[Number, Field(gt=0)]] = Field(min_length=1)
    """Standard deviation of each channel, or one value for all."""


class Statistics(Config):
    """The distribution of all numbers of a set of latents."""

    mean: list[Number]
    """Mean of each channel."""
    std: list[Number]
    """Standard deviation of each channel."""
    global_mean: Number
    """Mean of all numbers."""
    global_std: Number = Field(gt=0)
    """Standard deviation of all numbers."""
    declared: Declared | None = None
    """Factors of the codec's author, if there are any."""


PairKind = Literal["pairs", "captions", "features", "numbers", "images"]
"""Kind of the samples that the section `pairs` makes, which are read beside images or in place of them."""


class Manifest(Config):
    """Manifest of a set of shards: their content and its origin."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    """Version of shards and manifest."""
    kind: Literal["crops", "latents", "tokens", PairKind]
    """Kind of the samples."""
    name: str
    """Name of the data set."""
    crop: dict[str, Any] | None = None
    """Plain data that decide the pixels of a crop."""
    crops: str | None = None
    """Digest of the crops that latents or tokens were made from."""
    codec: dict[str, Any] | None = None
    """Identity of the codec that made latents or tokens."""
    precision: str | None = None
    """Precision in which the codec computed."""
    pairs: dict[str, Any] | None = None
    """Plain data that decide pairs of embeddings, encoded captions, or features."""
    missing_numbers: list[str] | None = None
    """Columns of numbers that some training images lack."""
    classes: list[str]
    """Names of the classes by number; empty without classes."""
    validation_fraction: float = Field(ge=0, lt=1)
    """Share of the samples for validation, by the hash of their content."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples for testing, by the hash of their content."""
    shape: list[Annotated[int, Field(ge=1, lt=2**24)]] = Field(min_length=1, max_length=4)
    """Shape of one array of a sample."""
    dtype: Literal["uint8", "uint16", "int16", "int32", "float16", "float32"]
    """Data type of the arrays."""
    offsets: dict[Literal["npy", "flip.npy"], int]
    """Bytes from the start of a sample to the numbers of each array."""
    stride: int
    """Bytes from one sample to the next."""
    num_samples: int = Field(ge=0)
    """Number of samples in all shards."""
    shards: list[Shard] = Field(min_length=1)
    """Shards, in the order of their samples."""
    index: Sha256
    """The sha256 of index.npy."""
    files: Hashes = Field(default_factory=dict)
    """The sha256 of the other files beside the manifest."""
    carried: Hashes = Field(default_factory=dict)
    """The sha256 of files that belong to models trained on the set, such as the text tower of pairs."""
    histogram: list[int] = Field(default_factory=list)
    """Number of samples of each class."""
    flags: dict[str, int] = Field(default_factory=dict)
    """Flags of images, and the number of images with each."""
    quarantined: int = 0
    """Number of files without a crop, or of pairs that were left out."""
    ignored: int = 0
    """Number of ignored files: hidden files, texts next to images, files of other kinds."""
    passed_over: dict[str, int] = Field(default_factory=dict)
    """Number of ignored files of each kind."""
    dropped: int = 0
    """Number of images that were left out as duplicates."""
    not_held_out: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Numbers of samples in the training split despite their low hash, since a near duplicate is in it."""
    held_out: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Numbers of the validation samples that were chosen by name instead of by hash."""
    statistics: Statistics | None = None
    """Statistics of latents."""
    levels: Levels | None = None
    """Data type of array crops, and the range of values that networks see."""
    num_tokens: int | None = Field(default=None, ge=1)
    """Size of the codebook of tokens."""
    token_counts: list[int] = Field(default_factory=list)
    """Number of occurrences of each token."""

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        layout = Layout(tuple(self.offsets), tuple(self.shape), self.dtype, labelled=bool(self.classes))
        for name, stated, expected in (
            ("offsets", self.offsets, layout.offsets()),
            ("stride", self.stride, layout.stride),
            ("num_samples", self.num_samples, sum(shard.num_samples for shard in self.shards)),
            *((shard.file, shard.bytes, layout.file_bytes(shard.num_samples)) for shard in self.shards),
        ):
            if stated != expected:
                raise ValueError(f"{name} is {stated}, but shape, classes and numbers of samples give {expected}.")
        levels = self.levels if self.kind == "crops" else None
        if levels is not None and (levels.dtype, len(levels.channels)) != (self.dtype, self.shape[0]):
            raise ValueError(
                f"levels are of {len(levels.channels)} channels of {levels.dtype}, but the samples are not."
            )
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction and test_fraction leave nothing to train on.")
        return self


def check_manifest(manifest: Any, path: str) -> dict[str, Any]:
    """Validate and return the manifest that was read from a path or URL. Raises ValueError with the errors in it."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads. Run its stage again.")
    try:
        parse(Manifest, manifest, path)
    except ValueError as error:
        first, *more = str(error).splitlines()
        others = f" (and {len(more):,} more)" if more else ""
        raise ValueError(f"{first}{others} Run the stage that writes it again, or get the set anew.") from None
    return manifest
