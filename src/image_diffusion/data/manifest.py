"""The manifest of a set of shards as a record: what is read from it is checked like a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from image_diffusion.core.config import Config, parse
from image_diffusion.data.records import FORMAT
from image_diffusion.data.tar import MAX_SAMPLES, Layout

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Shard(Config):
    """One shard."""

    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.tar$")
    """Name of the tar, which lies beside the manifest."""
    sha256: Sha256
    """Of the tar."""
    bytes: int = Field(ge=0, lt=2**48)
    """Size of the tar."""
    num_samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Samples in it."""


class Declared(Config):
    """The factors that the author of an autoencoder gave: x = (latent - mean) / std."""

    mean: list[Number] = Field(min_length=1)
    """Of each channel, or one for all."""
    std: list[Annotated[Number, Field(gt=0)]] = Field(min_length=1)
    """Likewise."""


class Statistics(Config):
    """The distribution of all numbers of a set of latents."""

    mean: list[Number]
    """Of each channel."""
    std: list[Number]
    """Of each channel."""
    global_mean: Number
    """Of all numbers."""
    global_std: Number = Field(gt=0)
    """Of all numbers."""
    declared: Declared | None = None
    """What the codec's author gave in their place, where one did."""


class Manifest(Config):
    """What lies where in a set of shards, and what made it."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    """Version of shards and manifest."""
    kind: Literal["crops", "latents", "tokens", "pairs", "captions", "features"]
    """What a sample is."""
    name: str
    """Of the data set."""
    crop: dict[str, Any] | None = None
    """What decides the pixels of a crop."""
    crops: str | None = None
    """Digest of the crops that latents or tokens were made from."""
    codec: dict[str, Any] | None = None
    """Identity of the codec that made latents or tokens."""
    precision: str | None = None
    """What the codec computed in."""
    pairs: dict[str, Any] | None = None
    """What decides pairs of embeddings, encoded captions, or features."""
    classes: list[str]
    """Names by number; empty without classes."""
    validation_fraction: float = Field(ge=0, lt=1)
    """Share of the samples for validation, by the hash of their content."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples for testing, likewise."""
    shape: list[Annotated[int, Field(ge=1, lt=2**24)]] = Field(min_length=1, max_length=4)
    """Of one array of a sample."""
    dtype: Literal["uint8", "int16", "int32", "float16", "float32"]
    """Of its numbers."""
    offsets: dict[Literal["npy", "flip.npy"], int]
    """Bytes from the start of a sample to the numbers of each array."""
    stride: int
    """Bytes from one sample to the next."""
    num_samples: int = Field(ge=0)
    """In all shards."""
    shards: list[Shard] = Field(min_length=1)
    """In the order of their samples."""
    index: Sha256
    """Of index.npy."""
    files: dict[str, Sha256] = Field(default_factory=dict)
    """The sha256 of what else lies beside it."""
    carried: dict[str, Sha256] = Field(default_factory=dict)
    """That of files that go with what is learnt from the set, such as the text tower of pairs."""
    histogram: list[int] = Field(default_factory=list)
    """Samples of each class."""
    flags: dict[str, int] = Field(default_factory=dict)
    """What was noted of images, and how often."""
    quarantined: int = 0
    """Files that gave no crop, or pairs that were left out."""
    ignored: int = 0
    """Hidden files."""
    dropped: int = 0
    """Images that were left out as duplicates of others."""
    not_held_out: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """The numbers of samples that are trained on although their hash is low: a near duplicate of each is."""
    statistics: Statistics | None = None
    """Of latents."""
    num_tokens: int | None = Field(default=None, ge=1)
    """Size of the codebook, of tokens."""
    token_counts: list[int] = Field(default_factory=list)
    """How often each token occurs."""

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
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction and test_fraction leave nothing to train on.")
        return self


def check_manifest(manifest: Any, path: str) -> dict[str, Any]:
    """The manifest that was read from a path or URL. Raises ValueError with what is wrong in it."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads. Run its stage again.")
    try:
        parse(Manifest, manifest, path)
    except ValueError as error:
        first, *more = str(error).splitlines()
        others = f" (and {len(more):,} more)" if more else ""
        raise ValueError(f"{first}{others} Run the stage that writes it again, or get the set anew.") from None
    return manifest
