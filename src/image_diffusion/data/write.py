"""Writing one shard: whole or absent, hashed on the way."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.files import atomic_write
from image_diffusion.data.records import key_prefix, record_path, tar_path
from image_diffusion.data.tar import BLOCK, MAX_SAMPLES, Layout

CHUNK_BYTES = 8 << 20
"""About how much of a shard is built in memory at a time."""

Chunk = tuple[Mapping[str, NDArray[np.generic]], NDArray[np.int64]]
"""The arrays of n samples by member, each [n, *shape], and their labels int64 [n]."""


def chunk_samples(layout: Layout) -> int:
    """How many samples are written at a time."""
    return max(1, CHUNK_BYTES // layout.stride)


def write_shard(folder: Path, shard: int, layout: Layout, chunks: Iterable[Chunk]) -> tuple[str, int, int]:
    """Write a shard's tar; returns its sha256, its size in bytes and its number of samples.

    The shard's old record goes first, so that a record never stands beside a tar it does not describe.
    Raises ValueError when the shard would hold too many samples.
    """
    record_path(folder, shard).unlink(missing_ok=True)
    hasher, count = hashlib.sha256(), 0
    with atomic_write(tar_path(folder, shard)) as file:
        for arrays, labels in chunks:
            if count + len(labels) > MAX_SAMPLES:
                raise ValueError(f"Shard {shard} would hold more than {MAX_SAMPLES:,} samples. Raise data.num_shards.")
            block = layout.samples(arrays, labels, key_prefix(shard), count).reshape(-1)
            file.write(block.data)
            hasher.update(block.data)
            count += len(labels)
        written = count * layout.stride
        end = bytes(-(written + 2 * BLOCK) % tarfile.RECORDSIZE + 2 * BLOCK)
        file.write(end)
        hasher.update(end)
    return hasher.hexdigest(), written + len(end), count


def histogram(labels: Iterable[int | None]) -> dict[str, int]:
    """How often each class occurs, by its number, in the order of the numbers."""
    counts: dict[int, int] = {}
    for label in labels:
        if label is not None:
            counts[label] = counts.get(label, 0) + 1
    return {str(label): counts[label] for label in sorted(counts)}
