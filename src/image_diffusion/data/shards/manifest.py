"""Manifest of a set of shards as a record: its values are checked like a configuration."""

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
    """Name of the tar, which lies beside the manifest."""
    sha256: Sha256
    """The sha256 of the tar."""
    bytes: int = Field(ge=0, lt=2**48)
    """Size of the tar."""
    num_samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Samples in it."""


class Declared(Config):
    """The factors that the author of an autoencoder gave: x = (latent - mean) / std."""

    mean: list[Number] = Field(min_length=1)
    """Mean of each channel, or one for all."""
    std: list[Annotated[Number, Field(gt=0)]] = Field(min_length=1)
    """Standard deviation of each channel, or one for all."""


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
    """Values that the codec's author gave in their place, where one did."""


PairKind = Literal["pairs", "captions", "features", "numbers", "images"]
"""Kind of the samples that the section `pairs` makes, which are read beside images or in place of them."""


class Manifest(Config):
    """Manifest of a set of shards: their content, and what made it."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    """Version of shards and manifest."""
    kind: Literal["crops", "latents", "tokens", PairKind]
    """Kind of a sample."""
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
    """Names by number; empty without classes."""
    validation_fraction: float = Field(ge=0, lt=1)
    """Share of the samples for validation, by the hash of their content."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples for testing, by the hash of their content."""
    shape: list[Annotated[int, Field(ge=1, lt=2**24)]] = Field(min_length=1, max_length=4)
    """Shape of one array of a sample."""
    dtype: Literal["uint8", "uint16", "int16", "int32", "float16", "float32"]
    """Type of its numbers."""
    offsets: dict[Literal["npy", "flip.npy"], int]
    """Bytes from the start of a sample to the numbers of each array."""
    stride: int
    """Bytes from one sample to the next."""
    num_samples: int = Field(ge=0)
    """In all shards."""
    shards: list[Shard] = Field(min_length=1)
    """In the order of their samples."""
    index: Sha256
    """The sha256 of index.npy."""
    files: Hashes = Field(default_factory=dict)
    """The sha256 of the other files beside the manifest."""
    carried: Hashes = Field(default_factory=dict)
    """The sha256 of files that belong to models trained on the set, such as the text tower of pairs."""
    histogram: list[int] = Field(default_factory=list)
    """Samples of each class."""
    flags: dict[str, int] = Field(default_factory=dict)
    """Flags of images, and the number of images with each."""
    quarantined: int = 0
    """Files that gave no crop, or pairs that were left out."""
    ignored: int = 0
    """Files that are ignored: hidden ones, texts beside images, other kinds."""
    passed_over: dict[str, int] = Field(default_factory=dict)
    """Number of these of each kind."""
    dropped: int = 0
    """Images that were left out as duplicates of others."""
    not_held_out: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Numbers of samples that are trained on although their hash is low: a near duplicate of each is."""
    held_out: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Numbers of samples for validation that were chosen by name, whatever their hash is."""
    statistics: Statistics | None = None
    """Statistics of latents."""
    levels: Levels | None = None
    """Numbers of crops that are arrays, and the range of them that networks see."""
    num_tokens: int | None = Field(default=None, ge=1)
    """Size of the codebook, of tokens."""
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
    """Return the manifest that was read from a path or URL. Raises ValueError with the mistakes in it."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads. Run its stage again.")
    try:
        parse(Manifest, manifest, path)
    except ValueError as error:
        first, *more = str(error).splitlines()
        others = f" (and {len(more):,} more)" if more else ""
        raise ValueError(f"{first}{others} Run the stage that writes it again, or get the set anew.") from None
    return manifest
