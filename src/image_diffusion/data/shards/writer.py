"""Write one shard with webdataset: atomically, hashed while writing, with the same bytes for the same samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.files.atomic import atomic_write
from image_diffusion.data.shards.records import record_path, sample_key, tar_path
from image_diffusion.data.shards.tar_layout import MAX_SAMPLES, Layout

CHUNK_BYTES = 8 << 20
"""Approximate size of the part of a shard that is built in memory at a time."""

Chunk = tuple[Mapping[str, NDArray[np.generic]], NDArray[np.int64]]
"""The arrays of n samples by member, each [n, *shape], and their labels int64 [n]."""


def chunk_samples(layout: Layout) -> int:
    """Return the number of samples that are written at a time."""
    return max(1, CHUNK_BYTES // layout.stride)


def write_shard(folder: Path, shard: int, layout: Layout, chunks: Iterable[Chunk]) -> tuple[str, int, int]:
    """Write a shard's tar; returns its sha256, its size in bytes and its number of samples.

    The shard's old record is deleted first, so that no record ever describes another tar. Raises ValueError when the
    shard would hold too many samples.
    """
    # Imports PyTorch, which takes seconds that a crop without new shards should not cost.
    from webdataset import TarWriter

    record_path(folder, shard).unlink(missing_ok=True)
    count = 0
    with atomic_write(tar_path(folder, shard)) as file:
        hashed = _Hashed(file)
        with TarWriter(hashed, encoder=False, mtime=0) as tar:
            for arrays, labels in chunks:
                if count + len(labels) > MAX_SAMPLES:
                    raise ValueError(
                        f"Shard {shard} would hold more than {MAX_SAMPLES:,} samples. Raise data.num_shards."
                    )
                stored = {name: array.astype(layout.dtype, copy=False) for name, array in arrays.items()}
                for i, label in enumerate(labels):
                    sample: dict[str, str | bytes] = {"__key__": sample_key(shard, count + i)}
                    sample |= {name: layout.header + array[i].tobytes() for name, array in stored.items()}
                    tar.write(sample | ({"cls": str(label).encode()} if layout.labelled else {}))
                count += len(labels)
    return hashed.sha256.hexdigest(), hashed.size, count


class _Hashed:
    """A file that is hashed and measured while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)


def histogram(labels: Iterable[int | None]) -> dict[str, int]:
    """Return the number of samples of each class, by the number of the class, in the order of the numbers."""
    counts = Counter(label for label in labels if label is not None)
    return {str(label): counts[label] for label in sorted(counts)}
