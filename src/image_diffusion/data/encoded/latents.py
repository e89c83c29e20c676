"""Encode shards of crops as shards of latents or tokens, one tar from each tar.

For each image the codec's moments (mean and standard deviation) of the image and of its mirror image, so that training
can draw a new latent and a new flip in every epoch without the codec. For a discrete codec with `tokens`, the tokens of
both instead, on which a prior over tokens is trained.

While a batch is encoded, the next is read and the one before is written, in three threads, so that a GPU waits for no
file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import Arriving, to_device, to_host
from image_diffusion.core.files.atomic import digest, write_json
from image_diffusion.core.files.checksums import check_files
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.shards.loader import prefetch
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.records import (
    FORMAT,
    Chunk,
    ShardRecord,
    describe_files,
    describe_shards,
    index_of,
    read_record,
    remove_surplus,
    reusable_record,
    tar_path,
    write_index,
    write_record,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.nn.precision import Precision, tf32

_MEMBERS = ("npy", "flip.npy")
_SPLITS = ("validation_fraction", "not_held_out", "held_out")  # keys of a manifest that choose the splits


class EncodeConfig(Config):
    """Encoding of images. The codec itself is a section of its own."""

    dtype: Literal["float16", "float32"] = "float16"
    """Data type of stored moments. The rounding of float16 is 50 times smaller than the smallest noise of DiT's
    process."""
    precision: Precision = "tf32"
    """Precision of the codec's computations. tf32: float32 with matrix factors rounded to 10 bits on a GPU, several
    times faster, with an error of 0.1 % in a latent. bf16: twice as fast again, with an error of 1 %."""
    tokens: bool = False
    """For the experiment that trains a discrete VAE: also store the data set as tokens, one integer per position, on
    which a prior over tokens can be trained."""
    compile: bool = False
    """Compile the codec with torch.compile, which takes a minute or two and pays off for large data sets."""
    batch_size: int = Field(default=32, ge=1)
    """Number of images per batch of the codec."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the torch dtype of the precision."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class Encoder(Protocol):
    """Interface of a codec. identity: plain data that distinguish it from every other codec.

    A `Tokenizer` gives integers [B, h, w] in place of moments.
    """

    @property
    def identity(self) -> dict[str, Any]: ...

    def encode(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, C, H, W] as float32 [B, 2, c, h, w]: mean and standard deviation; or the mean alone."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """An `Encoder` whose images become tokens: `encode` gives integers [B, h, w] from 0 to num_tokens - 1."""

    num_tokens: int


@runtime_checkable
class Declares(Protocol):
    """An `Encoder` with normalisation factors of its author, which the manifest stores next to the measured ones."""

    def declared(self) -> dict[str, Any]:
        """Return {"mean", "std"} of each channel, or one number each."""
        ...


def encode_shards(
    crops: Path,
    output: Path,
    codec: Encoder,
    settings: EncodeConfig,
    device: torch.device,
    part: tuple[int, int] = (0, 1),
) -> int:
    """Encode the shards of one part, those with `number % n == i` of part (i, n); returns how many were written.

    codec: built for `settings.compute_dtype`. Shards that are up to date are kept; their records are updated
    from those of the crops, whose ids change if files are saved again with equal pixels. `write_manifest` completes the
    set when every part is done.
    Raises ValueError when the crops are damaged or the codec gives a number that is not finite.
    """
    index, of = part
    task = _Task(crops, open_shards(crops, "all"), codec, settings, device)
    entries = task.source.manifest["shards"]
    counts = [entry["num_samples"] for entry in entries]
    mine = range(index, len(counts), of)
    written = 0
    with Progress("encode", sum(counts[shard] for shard in mine), "image") as progress:
        for shard in mine:
            record = reusable_record(output, shard, _made_from(entries[shard], codec, settings))
            if record is None:
                task.encode(shard, sum(counts[:shard]), output, progress.advance)
                written += 1
                continue
            if record.samples != (samples := read_record(crops, shard).samples):  # for files with equal pixels
                write_record(output, replace(record, samples=samples))
            progress.advance(counts[shard])
    return written


def write_manifest(
    crops: Path, output: Path, codec: Encoder, settings: EncodeConfig, pictures: Sequence[Path] = ()
) -> dict[str, Any]:
    """Write the manifest of a set whose shards all exist; returns it. pictures: files to list with their hashes.

    Raises ValueError naming the first shard that is missing or was made from something else.
    """
    source = open_shards(crops, "all")
    records = []
    for shard, entry in enumerate(source.manifest["shards"]):
        record = read_record(output, shard)
        samples = read_record(crops, shard).samples
        if record.made_from != _made_from(entry, codec, settings) or record.samples != samples:
            raise ValueError(
                f"{tar_path(output, shard)} was made from other crops or by another codec. Run encode again."
            )
        records.append(record)
    about = {
        "crop": source.manifest["crop"],
        "crops": source.digest,
        **{
            name: source.manifest[name]
            for name in (*_SPLITS, "name", "classes", "histogram", "levels")
            if name in source.manifest
        },
    }
    return finish(about, _MEMBERS, records, output, codec, settings, pictures)


def finish(
    about: Mapping[str, Any],
    members: tuple[str, ...],
    records: Sequence[ShardRecord],
    output: Path,
    codec: Encoder,
    settings: EncodeConfig,
    pictures: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the index and the manifest of shards that all exist; returns it. about: entries that describe the data from
    which the shards were made. members: names of the arrays in a sample."""
    remove_surplus(output, len(records))
    write_index(output / "index.npy", map(index_of, records))
    statistics = [record.statistics for record in records if record.statistics is not None]
    dtype = _stored_dtype(codec, settings)
    layout = Layout(members, tuple(statistics[0]["shape"]), dtype, labelled=bool(about["classes"]))
    summary: dict[str, Any]
    if isinstance(codec, Tokenizer):
        counts = np.sum([part["token_counts"] for part in statistics], axis=0)
        summary = {"num_tokens": codec.num_tokens, "token_counts": counts.tolist()}
    else:
        declared = {"declared": codec.declared()} if isinstance(codec, Declares) else {}
        summary = {"statistics": merge_statistics(statistics) | declared}
    manifest = {
        "format": FORMAT,
        "kind": "tokens" if isinstance(codec, Tokenizer) else "latents",
        **about,
        "codec": codec.identity,
        "precision": settings.precision,
        **describe_shards(layout, records),
        **summary,
        **describe_files(output, len(records), pictures),
    }
    write_json(output / "manifest.json", manifest)
    return manifest


def merge_statistics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the distribution of x = mean + std eps over all images and their mirror images.

    mean, std: [c], of each channel. global_mean, global_std: of all numbers together; 1 / global_std is what the
    scale of a latent stands for (Rombach et al. 2022, appendix G). From float64 sums, exact in the stored numbers.
    """
    count = sum(part["count"] for part in parts)
    total = np.sum([part["sum"] for part in parts], axis=0)
    squares = np.sum([part["sum_of_squares"] for part in parts], axis=0)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    global_mean = float(mean.mean())
    global_std = float(np.sqrt(max(float(squares.sum()) / (count * len(mean)) - global_mean**2, 0.0)))
    return {"mean": mean.tolist(), "std": std.tolist(), "global_mean": global_mean, "global_std": global_std}


@dataclass(frozen=True)
class _Read:
    """A batch of crops. rows: in their shard. labels: int64 [B]. images: uint8 [B, C, H, W], on the codec's device."""

    rows: range
    labels: NDArray[np.int64]
    images: Tensor


@dataclass(frozen=True)
class _Task:
    """Settings that every shard of a set is encoded with. source: the crops, all of them, in the order of their
    shards."""

    crops: Path
    source: Shards
    codec: Encoder
    settings: EncodeConfig
    device: torch.device

    def encode(self, shard: int, first: int, output: Path, count: Callable[[int], None]) -> None:
        """Encode one shard, whose samples are numbered from `first` in the whole set. count: called at intervals with
        the number of images that have been encoded."""
        entry = self.source.manifest["shards"][shard]
        check_files(self.crops, {entry["file"]: entry["sha256"]}, "Run crop again.")
        crop = read_record(self.crops, shard)
        sums = _Counts(self.codec.num_tokens) if isinstance(self.codec, Tokenizer) else Sums()
        with prefetch(self._read(crop, first), 1, "crops") as read, prefetch(self._encode(read), 1, "codec") as encoded:
            chunks = self._chunks(encoded, crop, sums, count)
            head = list(islice(chunks, 1))  # all batches have its shape
            shape = head[0][0]["npy"].shape[1:] if head else ()
            dtype = _stored_dtype(self.codec, self.settings)
            layout = Layout(_MEMBERS, shape, dtype, labelled=self.source.num_classes > 0)
            sha256, size, num_samples = write_shard(output, shard, layout, chain(head, chunks))
        record = ShardRecord(
            shard=shard,
            made_from=_made_from(entry, self.codec, self.settings),
            sha256=sha256,
            bytes=size,
            num_samples=num_samples,
            histogram=crop.histogram,
            samples=crop.samples,
            made_with={"torch": torch.__version__},
            statistics=sums.record(shape),
        )
        write_record(output, record)

    def _read(self, crop: ShardRecord, first: int) -> Generator[_Read, None, None]:
        """Yield the images of a shard, batch by batch, on the codec's device or on their way to it."""
        for start in range(0, crop.num_samples, self.settings.batch_size):
            rows = range(start, min(start + self.settings.batch_size, crop.num_samples))
            samples = np.arange(first + rows.start, first + rows.stop)
            yield _Read(rows, self.source.labels[samples], to_device(self.source.gather(samples), self.device))

    def _encode(self, read: Iterator[_Read]) -> Generator[tuple[_Read, list[Arriving]], None, None]:
        """Yield the output of the codec for each batch, and for its mirror image, on its way to the host."""
        for batch in read:
            yield batch, [to_host(self._moments(images)) for images in (batch.images, batch.images.flip(-1))]

    @torch.inference_mode()
    def _moments(self, images: Tensor) -> Tensor:
        with tf32(self.settings.precision != "float32"):
            return self.codec.encode(images)

    def _chunks(
        self,
        encoded: Iterator[tuple[_Read, list[Arriving]]],
        crop: ShardRecord,
        sums: Sums | _Counts,
        count: Callable[[int], None],
    ) -> Iterator[Chunk]:
        for batch, both in encoded:
            plain, mirrored = (self._stored(moments(), crop, batch.rows) for moments in both)
            sums.add(plain)
            sums.add(mirrored)
            count(len(batch.rows))
            yield {"npy": plain, "flip.npy": mirrored}, batch.labels

    def _stored(self, moments: Tensor, crop: ShardRecord, rows: range) -> NDArray[np.generic]:
        """Return moments [B, 2, c, h, w] or tokens [B, h, w] as they are stored. Raises ValueError when one is not
        finite."""
        with np.errstate(over="ignore"):  # reported below, with the name of the sample
            stored: NDArray[np.generic] = moments.numpy().astype(_stored_dtype(self.codec, self.settings))
        finite = np.isfinite(stored).reshape(len(stored), -1).all(axis=1)
        if not finite.all():
            bad = crop.samples[rows[int(finite.argmin())]]
            raise ValueError(
                f"The codec gave a number that is not finite, or too large for {self.settings.dtype}, for {bad.path} "
                f"(sample {bad.key}). Set encode.dtype to float32, or look at the codec's weights."
            )
        return stored


class Sums:
    """Float64 sums over a shard: of x and of x squared, x = mean + std eps, by channel."""

    def __init__(self) -> None:
        self._count = 0
        self._sum: NDArray[np.float64] | float = 0.0
        self._squares: NDArray[np.float64] | float = 0.0

    def add(self, moments: NDArray[np.generic]) -> None:
        """Add moments [B, 2, c, h, w] to the sums, or means alone. E[x] = mean; E[x²] = mean² + std²."""
        values = moments.astype(np.float64)
        self._count += values.shape[0] * values.shape[3] * values.shape[4]
        self._sum = self._sum + values[:, 0].sum(axis=(0, 2, 3))
        self._squares = self._squares + (values**2).sum(axis=(0, 1, 3, 4))

    def record(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """Return plain data for the shard's record; None for a shard without samples. shape: of a sample, [2, c, h,
        w]."""
        if not self._count:
            return None
        return {
            "shape": list(shape),
            "count": self._count,
            "sum": np.asarray(self._sum).tolist(),
            "sum_of_squares": np.asarray(self._squares).tolist(),
        }


class _Counts:
    """Number of occurrences of each token in a shard."""

    def __init__(self, num_tokens: int) -> None:
        self._counts = np.zeros(num_tokens, np.int64)

    def add(self, tokens: NDArray[np.generic]) -> None:
        """Add tokens [B, h, w] to the counts."""
        self._counts += np.bincount(tokens.ravel(), minlength=len(self._counts))

    def record(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """Return plain data for the shard's record; None for a shard without samples. shape: of a sample, [h, w]."""
        return {"shape": list(shape), "token_counts": self._counts.tolist()} if self._counts.any() else None


def _stored_dtype(codec: Encoder, settings: EncodeConfig) -> str:
    if isinstance(codec, Tokenizer):
        return "int16" if codec.num_tokens <= 2**15 else "int32"
    return settings.dtype


def _made_from(crops: Mapping[str, Any], codec: Encoder, settings: EncodeConfig) -> str:
    """Return a digest of everything that decides the numbers of a shard. crops: the entry of its crops in the
    manifest."""
    stored = {"dtype": _stored_dtype(codec, settings), "precision": settings.precision}
    return digest({"format": FORMAT, "crops": crops["sha256"], "codec": codec.identity, **stored})
