"""Crop the images of a shard, and several shards in parallel processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from image_diffusion.core.files.atomic import digest
from image_diffusion.core.process.parent_watch import end_with, process_identifier
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.image import READER, Crop, quiet_pillow
from image_diffusion.data.quality.duplicates import grey, image_views, pixel_hash, sharpness
from image_diffusion.data.shards.records import (
    FORMAT,
    Chunk,
    Quarantined,
    Sample,
    ShardRecord,
    histogram,
    record_path,
    reusable_record,
    sample_key,
    write_record,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Item

_POLL_S = 0.5  # between reads of the pool's count
_done: Synchronized[int] | None = None  # in a process of the pool: number of items that all processes have done


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


def crop_shards(
    cropper: ShardCropper,
    tasks: Sequence[tuple[int, list[Item]]],
    processes: int,
    progress: Progress,
    drops: Mapping[int, Set[str]] | None = None,
) -> Iterator[tuple[ShardRecord, bool]]:
    """Yield the record of each shard, in order, and True if the shard was written. One process crops if one is enough
    or no others can be started.

    drops: names of the images that each shard leaves out; None: shards that do not exist yet leave nothing out.
    """
    work = [(shard, items, None if drops is None else drops[shard]) for shard, items in tasks]
    started = _pool(min(processes, len(work)))
    if started is None:
        for shard, items, drop in work:
            yield cropper.write(shard, items, drop, progress.advance)
        return
    (pool, done), reported = started, 0
    with pool:
        futures = [pool.submit(_crop_shard, cropper, shard, items, drop) for shard, items, drop in work]
        try:
            for future in futures:
                while True:
                    wait([future], _POLL_S)
                    count = done.get_obj().value  # without its lock, which a killed process may hold forever
                    progress.advance(count - reported)
                    reported = count
                    if future.done():
                        break
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pool(processes: int) -> tuple[ProcessPoolExecutor, Synchronized[int]] | None:
    """Start the processes that crop, with a shared count of the items that they have done."""
    if processes <= 1:
        return None
    try:
        spawn = multiprocessing.get_context("spawn")
        done: Synchronized[int] = spawn.Value("q", 0)
        return ProcessPoolExecutor(processes, spawn, _initialize, (process_identifier(), done)), done
    except OSError as error:  # shared memory is in /dev/shm
        reason = "several share memory in /dev/shm, which this machine does not give"
        print(f"crop: one process crops, since {reason}: {error}.", file=sys.stderr)
        return None


def _initialize(parent: str, done: Synchronized[int]) -> None:
    """Set up a process of the pool: end it with its parent process, and share the pool's count."""
    global _done
    _done = done
    end_with(parent.split())


def _crop_shard(
    cropper: ShardCropper, shard: int, items: list[Item], drop: Set[str] | None
) -> tuple[ShardRecord, bool]:
    """Write a shard in a process of the pool and add its items to the shared count."""
    done = _done
    assert done is not None

    def count(items: int) -> None:
        with done.get_lock():
            done.value += items

    return cropper.write(shard, items, drop, count)
