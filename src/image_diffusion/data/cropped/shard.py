"""Crop the images of one shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from image_diffusion.core.files.atomic import digest
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.image import READER, Crop, quiet_pillow
from image_diffusion.data.quality.duplicates import grey, image_views, pixel_hash, sharpness
from image_diffusion.data.shards.records import (
    FORMAT,
    Quarantined,
    Sample,
    ShardRecord,
    record_path,
    reusable_record,
    sample_key,
    write_record,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.data.shards.writer import Chunk, histogram, write_shard
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Item


@dataclass(frozen=True)
class ShardCropper:
    """Settings that crop any shard of a set.

    crop: an image file -> its crops. identity: everything that decides their pixels. output: the folder of the shards.
    """

    source: Source
    crop: Callable[[bytes], Crop]
    identity: dict[str, Any]
    layout: Layout
    output: Path

    def write(
        self, shard: int, items: list[Item], drop: Set[str] | None, count: Callable[[int], None]
    ) -> tuple[ShardRecord, bool]:
        """Write a shard and its record, unless it already holds exactly these images; return the record, and True if it
        was written.

        drop: names of the images to leave out; None: an existing shard may have left out any. count: called at
        intervals with the number of finished items. Raises ValueError for a tar that cannot be fetched, and for a file
        whose reading the user has to decide.
        """
        if record_path(self.output, shard).is_file():
            made_from = self._made_from(items, [self.source.state_of(item) for item in items])
            record = reusable_record(self.output, shard, made_from)
            if record is not None and drop in (None, record.dropped_names()) and record.describes_pixels():
                count(len(items))
                return record, False
        samples: list[Sample] = []
        greys: list[NDArray[np.uint8]] = []
        bad: list[Quarantined] = []

        def chunks() -> Iterator[Chunk]:
            number = 0
            for item in items:
                count(1)
                for image, read in self.source.images_of(item):
                    cropped = self._cropped(image.name, read)
                    if isinstance(cropped, Quarantined):
                        bad.append(cropped)
                        continue
                    sha256, crop = cropped
                    for view, pixels in enumerate(crop.crops):
                        key = "" if image.name in (drop or ()) else sample_key(shard, number)
                        about = crop.size, crop.flags, crop.format, crop.mode, pixel_hash(pixels)
                        sample = Sample(key, image.name, sha256, image.label, *about, view=view, values=crop.values)
                        samples.append(replace(sample, sharpness=sharpness(pixels), pixel_size=crop.pixel_size))
                        greys.append(grey(pixels))
                        if key:
                            number += 1
                            yield {"npy": pixels[np.newaxis]}, np.array([image.label or 0])

        with quiet_pillow():
            sha256, size, num_samples = write_shard(self.output, shard, self.layout, chunks())
        every = _measured(samples, greys)
        samples, dropped = [sample for sample in every if sample.key], [sample for sample in every if not sample.key]
        # The hash is of the bytes that were cropped, since an image may have changed in the meantime.
        hashes = content_hashes(every, bad)
        states = [hashes[item.name] if item.name in hashes else self.source.state_of(item) for item in items]
        versions = {"pillow": PIL.__version__, "libjpeg_turbo": str(features.version("libjpeg_turbo"))}
        record = ShardRecord(
            shard=shard,
            made_from=self._made_from(items, states),
            sha256=sha256,
            bytes=size,
            num_samples=num_samples,
            histogram=histogram(sample.label for sample in samples),
            samples=samples,
            made_with=versions,
            quarantined=bad,
            dropped=dropped,
        )
        write_record(self.output, record)
        return record, True

    def _cropped(self, name: str, read: Callable[[], bytes]) -> tuple[str, Crop] | Quarantined:
        """Return the sha256 of an image file and its crops, or the reason why it has none. Raises ValueError for a file
        whose reading the user has to decide."""
        try:
            data = read()
        except OSError as error:
            return Quarantined(name, f"cannot be read: {error.strerror or error}")
        sha256 = hashlib.sha256(data).hexdigest()
        try:
            return sha256, self.crop(data)
        except Undecided as error:
            raise ValueError(f"{name}: {error}") from None
        except BadImage as error:
            return Quarantined(name, str(error), sha256)

    def _made_from(self, items: list[Item], states: list[str]) -> str:
        """Return a digest of everything that decides the bytes of a shard: the format, the crop, and each image's path,
        content and class."""
        images = [[item.name, state, item.label] for item, state in zip(items, states, strict=True)]
        return digest({"format": FORMAT, "reader": READER, "crop": self.identity, "images": images})


def content_hashes(samples: Iterable[Sample], bad: Iterable[Quarantined]) -> dict[str, str]:
    """Return the content hash of every file that was read, by its name."""
    return {sample.path: sample.sha256 for sample in samples} | {row.path: row.sha256 for row in bad}


def _measured(samples: Sequence[Sample], greys: Sequence[NDArray[np.uint8]]) -> list[Sample]:
    """Return the samples with measurements of their grey crops, which are computed for all samples together."""
    if not samples:
        return []
    pixels = np.stack(greys)
    means, contrasts = pixels.mean((1, 2)).round(3).tolist(), pixels.std((1, 2)).round(3).tolist()
    rows = zip(samples, image_views(pixels), means, contrasts, strict=True)
    return [replace(sample, look=look, brightness=mean, contrast=contrast) for sample, look, mean, contrast in rows]
