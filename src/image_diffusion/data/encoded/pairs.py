"""Pairs of embeddings -> shards: one stored sample [2 + L, dim] is an image, its caption, and the caption's L tokens.
Or the captions alone, [captions, 1 + L, dim], which are read beside the latents of the same images; or numbers of each
image, [columns, 2]; or another image, [C, H, W]; or a teacher's features of each image and of its mirror image, [D, h,
w] twice.

Missing tokens and missing captions are rows of zeros. The shards, records and manifest are those of crops and latents;
a pair's split follows from the hash of its id alone. Pairs without a caption, or with an embedding of zeros or
non-finite numbers, are left out and listed in quarantine.csv.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import digest, make_folder, remove_unfinished, sha256_file, write_json
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.shards.manifest import PairKind
from image_diffusion.data.shards.records import (
    FORMAT,
    Chunk,
    Quarantined,
    Sample,
    ShardRecord,
    chunk_samples,
    describe_files,
    describe_shards,
    index_of,
    remove_surplus,
    reusable_record,
    sample_key,
    share_of_hashes,
    write_index,
    write_quarantine,
    write_record,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout

IMAGE, TEXT, TOKENS = 0, 1, 2
"""Row indices in a stored pair: the image's embedding, the caption's embedding, and the first token's embedding."""


class Splits(Config):
    """Shares of the pairs, by the hash of each pair's id."""

    train: float = Field(0.75, gt=0, le=1)
    """Share of pairs for training."""
    validation: float = Field(0.15, ge=0, lt=1)
    """Share of pairs for validation during training."""
    test: float = Field(0.1, ge=0, lt=1)
    """Share of pairs for the final test."""

    @model_validator(mode="after")
    def _whole(self) -> Splits:
        total = math.fsum((self.train, self.validation, self.test))
        if abs(total - 1) > 1e-6:
            raise ValueError(
                f"train {self.train}, validation {self.validation} and test {self.test} sum to {total:.6g}. Choose "
                f"shares that sum to 1."
            )
        return self

    def trains(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Return whether each id, a hexadecimal hash, is that of a pair in the training split, [N]."""
        content = np.array([int(identity[:16], 16) for identity in ids], dtype=np.uint64)
        return content >= share_of_hashes(self.validation + self.test)


class PairSet(ABC):
    """Maker of the pairs of a set, a shard at a time.

    kind: of the shards. identity: plain data that, together with `made_from`, decide the numbers of a shard. shape: of
    one pair; its last entry is the dimension of an embedding. parts: names of the first rows of a pair, none of which
    may be zeros; the others are tokens, and captions after the first. members: names of the arrays of this shape in a
    sample. num_shards: of the set. num_rows: number of candidate pairs, including incomplete ones. carried: names of
    files in the folder of the set that belong to models trained on it. made_from_pixels: whether `made_from` is a
    digest of the pixels of crops, without the ids of their images. missing_numbers: columns of numbers that some
    training images lack, which are not part of the identity; None without numbers.
    """

    kind: ClassVar[PairKind]
    members: ClassVar[tuple[str, ...]] = ("npy",)
    parts: ClassVar[tuple[str, ...]] = ()
    made_from_pixels: ClassVar[bool] = False
    identity: dict[str, Any]
    shape: tuple[int, ...]
    num_shards: int
    num_rows: int
    carried: tuple[str, ...] = ()
    missing_numbers: tuple[str, ...] | None = None

    @abstractmethod
    def samples(self, shard: int) -> list[Sample]:
        """Return the pairs of a shard, with the hash of each pair's id in `sha256`. Raises ValueError."""

    @abstractmethod
    def missing(self, shard: int) -> list[Quarantined]:
        """Return the incomplete pairs of a shard, which are left out, with the reason."""

    @abstractmethod
    def made_from(self, shard: int) -> str:
        """Return a digest of the inputs from which the numbers of a shard are read or computed."""

    @abstractmethod
    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32] | NDArray[np.uint8]:
        """Return pairs start … stop - 1 of a shard, float32 [n, members, *shape]; [n, *shape] of one; images as uint8.
        Raises ValueError."""


def write_pairs(
    pairs: PairSet,
    name: str,
    splits: Splits,
    dtype: Literal["float16", "float32", "uint8"],
    output: Path,
    max_bad_fraction: float = 0.0,
) -> tuple[dict[str, Any], int]:
    """Write shards, records, quarantine.csv, index.npy and manifest.json; returns the manifest and how many shards were
    written.

    Shards that are up to date are kept. A pair without a caption, or with an embedding that is zeros or not finite, is
    left out. Raises ValueError if more than `max_bad_fraction` of the pairs are left out, for a number that is too
    large for the dtype, or for an empty set.
    """
    layout = Layout(pairs.members, pairs.shape, dtype, labelled=False)
    make_folder(output)
    remove_unfinished(output)
    (output / "manifest.json").unlink(missing_ok=True)  # while shards change, the set is incomplete
    records, indices, written = [], [], 0
    with Progress("embed", pairs.num_rows, "pair") as progress:
        for shard in range(pairs.num_shards):
            made_from = digest(
                {"format": FORMAT, "pairs": pairs.identity, "dtype": dtype, "inputs": pairs.made_from(shard)}
            )
            record = _reusable(pairs, shard, made_from, output)
            if record is None:
                record = _write(pairs, shard, layout, made_from, output, progress.advance)
                written += 1
            else:
                progress.advance(record.num_samples + len(record.quarantined))
            indices.append(index_of(record))
            records.append(replace(record, samples=[]))  # a set may have hundreds of millions
    bad = [row for record in records for row in record.quarantined]
    write_quarantine(output / "quarantine.csv", bad)
    count = sum(record.num_samples for record in records)
    _check_bad_fraction(bad, count, max_bad_fraction, output)
    remove_surplus(output, pairs.num_shards)
    write_index(output / "index.npy", indices)
    manifest = {
        "format": FORMAT,
        "kind": pairs.kind,
        "name": name,
        "pairs": pairs.identity,
        "classes": [],
        "validation_fraction": splits.validation,
        "test_fraction": splits.test,
        **describe_shards(layout, records),
        "quarantined": len(bad),
        **describe_files(output, len(records)),
    }
    if pairs.missing_numbers is not None:
        manifest["missing_numbers"] = list(pairs.missing_numbers)
    if pairs.carried:
        manifest["carried"] = {name: sha256_file(output / name) for name in pairs.carried}
        manifest["files"] |= manifest["carried"]
    write_json(output / "manifest.json", manifest)
    return manifest, written


def _check_bad_fraction(bad: list[Quarantined], good: int, max_bad_fraction: float, output: Path) -> None:
    """Raise ValueError when too few pairs are left."""
    total = good + len(bad)
    if not total:
        raise ValueError(f"{output} would hold no pair. Look at the data set they are made from.")
    if bad and (not good or len(bad) / total > max_bad_fraction):
        raise ValueError(
            f"{len(bad):,} of {total:,} pairs ({len(bad) / total:.1%}) are of no use, more than data.max_bad_fraction "
            f"= {max_bad_fraction:g}. The first is {bad[0].path}: {bad[0].reason}. See {output / 'quarantine.csv'}; "
            f"repair or remove them, or raise the limit."
        )


def _reusable(pairs: PairSet, shard: int, made_from: str, output: Path) -> ShardRecord | None:
    """Return the record of a shard that is already as it should be; None when it must be written.

    If the crops are now of other files with equal pixels, the record is rewritten with their ids.
    """
    record = reusable_record(output, shard, made_from)
    if record is None or not pairs.made_from_pixels:
        return record
    samples = [replace(sample, key=sample_key(shard, number)) for number, sample in enumerate(pairs.samples(shard))]
    images = {(sample.path, sample.view, sample.sha256) for sample in samples}
    if images.issuperset((sample.path, sample.view, sample.sha256) for sample in record.samples):
        return record
    if len(samples) != len(record.samples):  # some were left out, and their paths do not identify them
        return None
    record = replace(record, samples=samples, quarantined=pairs.missing(shard))
    write_record(output, record)
    return record


def _write(
    pairs: PairSet, shard: int, layout: Layout, made_from: str, output: Path, count: Callable[[int], None]
) -> ShardRecord:
    samples, bad = list[Sample](), pairs.missing(shard)
    count(len(bad))
    chunks = _chunks(pairs, shard, layout, samples, bad, count)
    sha256, size, num_samples = write_shard(output, shard, layout, chunks)
    assert num_samples == len(samples)
    record = ShardRecord(shard, made_from, sha256, size, num_samples, {}, samples, {"numpy": np.__version__}, bad)
    write_record(output, record)
    return record


def _chunks(
    pairs: PairSet,
    shard: int,
    layout: Layout,
    samples: list[Sample],
    bad: list[Quarantined],
    count: Callable[[int], None],
) -> Iterator[Chunk]:
    """Yield the pairs of a shard in batches, append each to `samples` or `bad`, and report the progress to `count`."""
    candidates, size = pairs.samples(shard), min(256, chunk_samples(layout))
    members = layout.members
    for start in range(0, len(candidates), size):
        stop = min(start + size, len(candidates))
        rows = pairs.rows(shard, start, stop)
        rows = rows if len(members) > 1 else rows[:, None]
        if rows.shape != (stop - start, len(members), *layout.shape):
            raise ValueError(
                f"Pairs of {candidates[start].path} have shape {list(rows.shape[2:])}, not {list(layout.shape)}: the "
                f"embeddings of images, captions and tokens must have one dimension. Use those of one model."
            )
        with np.errstate(over="ignore"):  # reported below, with the name of the pair
            stored = rows.astype(layout.dtype)
        faults = _faults(stored, rows, candidates[start:stop], pairs.parts)
        for sample, fault in zip(candidates[start:stop], faults, strict=True):
            if fault is not None:
                bad.append(Quarantined(sample.path, fault, sample.sha256))
            else:
                samples.append(replace(sample, key=sample_key(shard, len(samples))))
        count(stop - start)
        good = np.array([fault is None for fault in faults])
        yield {name: stored[good, i] for i, name in enumerate(members)}, np.zeros(good.sum(), dtype=np.int64)


def _faults(
    stored: NDArray[np.generic], rows: NDArray[np.generic], samples: list[Sample], parts: tuple[str, ...]
) -> list[str | None]:
    """Return the fault of each pair; None for a pair without one. Raises ValueError for a number too large for the
    stored type."""
    n, dim = len(stored), stored.shape[-1]
    flat, plain = stored.reshape(n, -1, dim), rows.reshape(n, -1, dim)
    finite, plain_finite = np.isfinite(flat).all(axis=2), np.isfinite(plain).all(axis=2)  # [n, R]
    if (too_large := plain_finite & ~finite).any():
        sample, row = (int(places[0]) for places in np.nonzero(too_large))
        raise ValueError(
            f"The {_part(row, parts)} embedding of pair {samples[sample].path} is too large for float16. Set "
            f"pairs.dtype to float32."
        )
    empty = ~flat[:, : len(parts)].any(axis=2)  # [n, P]
    faults: list[str | None] = [None] * n
    for faulty, fault in ((empty, "is all zeros"), (~finite, "is not finite")):
        for sample, row in zip(*np.nonzero(faulty), strict=True):
            faults[sample] = f"its {_part(row, parts)} embedding {fault}"
    return faults


def _part(row: int, parts: tuple[str, ...]) -> str:
    return parts[row] if row < len(parts) else "token"
