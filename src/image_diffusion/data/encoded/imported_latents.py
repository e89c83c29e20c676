"""Import latents of other tools as shards, in the format of `data.encoded.latents`, without reading images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.files.atomic import digest
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.encoded.latents import EncodeConfig, Encoder, Sums, finish
from image_diffusion.data.shards.records import (
    FORMAT,
    Chunk,
    Sample,
    ShardRecord,
    chunk_samples,
    class_histogram,
    histogram,
    read_record,
    record_path,
    reusable_record,
    sample_key,
    tar_path,
    write_record,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.data.sources.base import FileGroup, Item, Listing, by_shard
from image_diffusion.data.sources.changes import record_source
from image_diffusion.data.sources.latents import Encoded, LatentSource


@dataclass(frozen=True)
class Import:
    """Import of the latents of a source as a set of shards.

    spec: shape of the latents, from codec and data.resolution. codec: the codec of the latents, used only to decode.
    """

    data: DataConfig
    spec: DataSpec
    codec: Encoder
    settings: EncodeConfig
    output: Path
    files: list[FileGroup] = field(init=False)
    listing: Listing = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a source that is incomplete, or holds latents of another shape."""
        object.__setattr__(self, "files", list(self.source.file_groups()))
        object.__setattr__(self, "listing", self.source.listing())
        self._stored(self.listing.items[0])

    @property
    def source(self) -> LatentSource:
        assert isinstance(self.data.source, LatentSource)
        return self.data.source

    @property
    def layout(self) -> Layout:
        """Return the layout of a shard, with a latent of each image and, if available, of its mirror image."""
        shape = self.source.num_moments, self.spec.channels, *self.spec.size
        members = ("npy", "flip.npy") if self.source.has_mirror_images else ("npy",)
        return Layout(members, shape, self.settings.dtype, labelled=bool(self.listing.classes))

    def write_shards(self, part: tuple[int, int] = (0, 1)) -> int:
        """Write the shards of one part, those with `number % n == i` of part (i, n), unless they are up to date;
        returns the number of written shards. Raises ValueError for a latent that cannot be read, is of another shape,
        or has a number that is not finite."""
        shards = by_shard(self.listing.items, self.data.num_shards)
        mine, written = range(part[0], len(shards), part[1]), 0
        with Progress("encode: import", sum(len(shards[shard]) for shard in mine), self.listing.unit) as progress:
            for shard in mine:
                if self._is_kept(shard, shards[shard]):
                    progress.advance(len(shards[shard]))
                else:
                    self._write(shard, shards[shard], progress.advance)
                    written += 1
        return written

    def write_manifest(self, note: Path) -> dict[str, Any]:
        """Write the manifest of the shards, which all exist, and note (in source.json) what was read; returns it.

        Raises ValueError for a shard that is missing or damaged.
        """
        records = [read_record(self.output, shard) for shard in range(self.data.num_shards)]
        about = {
            "name": self.data.name,
            "classes": self.listing.classes,
            "validation_fraction": self.data.validation_fraction,
            "histogram": class_histogram(records, len(self.listing.classes)),
        }
        manifest = finish(about, self.layout.members, records, self.output, self.codec, self.settings)
        record_source(self.data.source, note, self.files, {})
        return manifest

    def _storage(self) -> hashlib._Hash:
        """Begin the digest of the bytes of a shard with the storage format; `_state_of` each latent follows."""
        stored = {"dtype": self.settings.dtype, "shape": list(self.layout.shape), "read": self.source.settings()}
        start = digest({"format": FORMAT, "codec": self.codec.identity, "members": list(self.layout.members), **stored})
        return hashlib.sha256(start.encode())

    def _is_kept(self, shard: int, items: list[Item]) -> bool:
        if not record_path(self.output, shard).is_file() or not tar_path(self.output, shard).is_file():
            return False
        made_from = self._storage()
        for item in items:
            made_from.update(_state_of(item, self.source.encoded(item)))
        return reusable_record(self.output, shard, made_from.hexdigest()) is not None

    def _write(self, shard: int, items: list[Item], count: Callable[[int], None]) -> None:
        samples: list[Sample] = []
        sums, made_from = Sums(), self._storage()

        def chunks() -> Iterator[Chunk]:
            size = chunk_samples(self.layout)
            for some in (items[start : start + size] for start in range(0, len(items), size)):
                rows = []
                for item in some:
                    arrays, encoded = self._stored(item)
                    rows.append(arrays)
                    made_from.update(_state_of(item, encoded))
                    key = sample_key(shard, len(samples))
                    samples.append(Sample(key, item.name, encoded.sha256, item.label, (0, 0), []))
                stacked = [np.stack(rows_of_member) for rows_of_member in zip(*rows, strict=True)]
                for member in stacked:
                    sums.add(member)
                count(len(some))
                labels = np.array([item.label or 0 for item in some])
                yield dict(zip(self.layout.members, stacked, strict=True)), labels

        sha256, size, num_samples = write_shard(self.output, shard, self.layout, chunks())
        record = ShardRecord(
            shard=shard,
            made_from=made_from.hexdigest(),
            sha256=sha256,
            bytes=size,
            num_samples=num_samples,
            histogram=histogram(sample.label for sample in samples),
            samples=samples,
            made_with={},
            statistics=sums.record(self.layout.shape),
        )
        write_record(self.output, record)

    def _stored(self, item: Item) -> tuple[list[NDArray[np.generic]], Encoded]:
        """Return the arrays of a latent in the stored type, and the latent as it was read. Raises ValueError for a
        latent that has another shape or is not finite."""
        encoded, shape = self.source.encoded(item), self.layout.shape
        stored = []
        for array in encoded.arrays:
            if array.shape != shape:
                raise ValueError(
                    f"{self.source.path}: {item.name} holds latents of {list(array.shape[1:])}, but data.resolution "
                    f"{self.data.resolution} and the codec give {list(shape[1:])} (channels, height, width). Set "
                    f"data.resolution and codec to those that they were encoded with."
                )
            with np.errstate(over="ignore"):  # reported below, with the name of the latent
                stored.append(array.astype(self.settings.dtype))
            if not np.isfinite(stored[-1]).all():
                raise ValueError(
                    f"{self.source.path}: {item.name} holds a number that is not finite, or too large for "
                    f"{self.settings.dtype}. Set encode.dtype to float32, or write the file again."
                )
        return stored, encoded


def _state_of(item: Item, encoded: Encoded) -> bytes:
    return digest([item.name, encoded.sha256, item.label]).encode()
