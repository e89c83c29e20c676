"""Pairs of embeddings -> shards: one stored sample [2 + L, dim] is an image, its caption, and the caption's L tokens.

Rows of tokens that a caption does not have are zeros. The shards, records and manifest are those of crops and latents;
a pair's split follows from the hash of its id alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from image_diffusion.core.config import Config
from image_diffusion.core.files import digest, remove_unfinished, sha256_file, write_json
from image_diffusion.core.progress import Progress
from image_diffusion.data.records import (
    FORMAT,
    Sample,
    ShardRecord,
    describe_shards,
    index_of,
    kept,
    record_hashes,
    remove_surplus,
    write_indices,
    write_record,
)
from image_diffusion.data.tar import Layout
from image_diffusion.data.write import Chunk, chunk_samples, write_shard

IMAGE, TEXT, TOKENS = 0, 1, 2
"""Rows of a stored pair: the image's embedding, the caption's, and from here on those of its tokens."""


class Splits(Config):
    """Shares of the pairs, by the hash of each pair's id."""

    train: float = Field(0.75, gt=0, le=1)
    """What is learned from."""
    validation: float = Field(0.15, ge=0, lt=1)
    """What is looked at while training."""
    test: float = Field(0.1, ge=0, lt=1)
    """What is looked at in the end."""

    @model_validator(mode="after")
    def _whole(self) -> Splits:
        total = math.fsum((self.train, self.validation, self.test))
        if abs(total - 1) > 1e-6:
            raise ValueError(
                f"train {self.train}, validation {self.validation} and test {self.test} sum to {total:.6g}. Choose "
                f"shares that sum to 1."
            )
        return self


class PairSet(Protocol):
    """What makes the pairs of a set, a shard at a time.

    identity: plain data; together with what a shard is made from it decides every number. dim: of an embedding.
    num_tokens: rows of token encodings, L. num_shards: of the set.
    """

    identity: dict[str, Any]
    dim: int
    num_tokens: int
    num_shards: int

    def samples(self, shard: int) -> list[Sample]:
        """The pairs of a shard; the hash of each one's id stands in `sha256`. Raises ValueError."""
        ...

    def made_from(self, shard: int) -> str:
        """A digest of what its numbers are read or computed from."""
        ...

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        """Pairs start … stop - 1 of a shard, float32 [n, 2 + L, dim]. Raises ValueError."""
        ...


def write_pairs(
    pairs: PairSet, name: str, splits: Splits, dtype: Literal["float16", "float32"], output: Path
) -> tuple[dict[str, Any], int]:
    """Write shards, records, index.npy and manifest.json; returns the manifest and how many shards were written.

    Shards that already hold what they should are kept. Raises ValueError for a number that is not finite, an embedding
    of zeros, or an empty set.
    """
    layout = Layout(("npy",), (TOKENS + pairs.num_tokens, pairs.dim), dtype, labelled=False)
    output.mkdir(parents=True, exist_ok=True)
    remove_unfinished(output)
    (output / "manifest.json").unlink(missing_ok=True)  # while shards change, nobody may take the set for whole
    records, indices, written = [], [], 0
    with Progress("embed", pairs.num_shards, "shard") as progress:
        for shard in range(pairs.num_shards):
            made_from = digest(
                {"format": FORMAT, "pairs": pairs.identity, "dtype": dtype, "inputs": pairs.made_from(shard)}
            )
            record = kept(output, shard, made_from)
            if record is None:
                record = _write(pairs, shard, layout, made_from, output)
                written += 1
            indices.append(index_of(record))
            records.append(replace(record, samples=[]))  # a set may have hundreds of millions
            progress.advance()
    if not sum(record.num_samples for record in records):
        raise ValueError(f"{output} would hold no pair. Look at the data set they are made from.")
    remove_surplus(output, pairs.num_shards)
    write_indices(output / "index.npy", indices)
    manifest = {
        "format": FORMAT,
        "kind": "pairs",
        "name": name,
        "pairs": pairs.identity,
        "classes": [],
        "validation_fraction": splits.validation,
        "test_fraction": splits.test,
        **describe_shards(layout, records),
        "index": sha256_file(output / "index.npy"),
        "files": record_hashes(output, len(records)),
    }
    write_json(output / "manifest.json", manifest)
    return manifest, written


def _write(pairs: PairSet, shard: int, layout: Layout, made_from: str, output: Path) -> ShardRecord:
    samples = pairs.samples(shard)
    sha256, size, count = write_shard(output, shard, layout, _chunks(pairs, shard, layout, samples))
    assert count == len(samples)
    record = ShardRecord(shard, made_from, sha256, size, count, {}, samples, {"numpy": np.__version__})
    write_record(output, record)
    return record


def _chunks(pairs: PairSet, shard: int, layout: Layout, samples: list[Sample]) -> Iterator[Chunk]:
    size = min(256, chunk_samples(layout))
    for start in range(0, len(samples), size):
        stop = min(start + size, len(samples))
        rows = pairs.rows(shard, start, stop)
        if rows.shape != (stop - start, *layout.shape):
            raise ValueError(
                f"Pairs of {samples[start].path} have shape {list(rows.shape[1:])}, not {list(layout.shape)}: the "
                f"embeddings of images, captions and tokens must have one dimension. Use those of one model."
            )
        with np.errstate(over="ignore"):  # told below, by name
            stored = rows.astype(layout.dtype)
        _check(stored, rows, samples[start:stop])
        yield {"npy": stored}, np.zeros(stop - start, dtype=np.int64)


def _check(stored: NDArray[np.generic], rows: NDArray[np.float32], samples: list[Sample]) -> None:
    finite = np.isfinite(stored).all(axis=2)  # [n, 2 + L]
    if not finite.all():
        sample, row = (int(each[0]) for each in np.nonzero(~finite))
        fault = "is too large for float16" if np.isfinite(rows[sample, row]).all() else "is not finite"
        advice = "Set pairs.dtype to float32" if "large" in fault else "Remove that pair, or make it again"
        raise ValueError(f"The {_part(row)} embedding of pair {samples[sample].path} {fault}. {advice}.")
    empty = ~stored[:, :TOKENS].any(axis=2)  # [n, 2]
    if empty.any():
        sample, row = (int(each[0]) for each in np.nonzero(empty))
        raise ValueError(
            f"The {_part(row)} embedding of pair {samples[sample].path} is all zeros. Remove that pair, or make it "
            f"again."
        )


def _part(row: int) -> str:
    return {IMAGE: "image", TEXT: "text"}.get(row, "token")
