"""Files of a set of shards: one tar and one record per shard, one manifest, and one small index of all samples.

A tar is written with webdataset, atomically and hashed while writing: the same samples give the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.files.atomic import atomic_write, read_json, sha256_file, write_json, write_text
from image_diffusion.core.files.checksums import describe
from image_diffusion.data.shards.tar_layout import KEY_DIGITS, MAX_SAMPLES, Layout

FORMAT = 1
"""Version of the shards, records and manifests. Other versions are rewritten, and rejected by readers."""

UNWANTED = "data.keep: "
"""Prefix of the reason for an image that `data.keep` leaves out."""

INDEX = np.dtype([("label", "<i4"), ("content", "<u8")])
"""Entry of a sample: its class (0 without classes) and the first eight bytes of its source's sha256."""

CHUNK_BYTES = 8 << 20
"""Approximate size of the part of a shard that is built in memory at a time."""

Chunk = tuple[Mapping[str, NDArray[np.generic]], NDArray[np.int64]]
"""The arrays of n samples by member, each [n, *shape], and their labels int64 [n]."""


@dataclass(frozen=True)
class Sample:
    """One sample of a shard: its key in the tar, and its image.

    path, sha256: of the image file, within its source. size: [width, height] of the upright image, in pixels. format,
    mode: of the file, by Pillow's names. pixels, look: `duplicates.pixel_hash` and `duplicates.image_views` of the
    crop. brightness, contrast: mean and standard deviation of the crop in grey, 0 to 255. sharpness: mean difference of
    neighbouring pixels of the crop, 0 to 255. view: number of the crop among those of its image. values:
    `StoredPixels.values` of the file. pixel_size: height and width of a pixel in micrometres. The fields from `format`
    on are empty in records of earlier versions."""

    key: str
    path: str
    sha256: str
    label: int | None
    size: tuple[int, int]
    flags: list[str]
    format: str = ""
    mode: str = ""
    pixels: str = ""
    look: str = ""
    brightness: float = 0.0
    contrast: float = 0.0
    sharpness: float = 0.0
    view: int = 0
    values: list[int] = field(default_factory=list)
    pixel_size: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Quarantined:
    """One file without a sample, and the reason. sha256 is empty if the file could not be read."""

    path: str
    reason: str
    sha256: str = ""


@dataclass(frozen=True)
class ShardRecord:
    """Record of one shard. A shard is rewritten if the `made_from` in its record differs from that of its inputs.

    made_from: digest of everything that decides its bytes. sha256, bytes: of the tar. histogram: samples of each class
    that occurs, by its number. made_with: versions of the libraries that made it. statistics: sums over the numbers of
    a latent shard, None for crops. dropped: images that were cropped but left out as duplicates.
    """

    shard: int
    made_from: str
    sha256: str
    bytes: int
    num_samples: int
    histogram: dict[str, int]
    samples: list[Sample]
    made_with: dict[str, str]
    quarantined: list[Quarantined] = field(default_factory=list)
    statistics: dict[str, Any] | None = None
    dropped: list[Sample] = field(default_factory=list)
    format: int = FORMAT

    def dropped_names(self) -> set[str]:
        """Return the names of the images that were left out."""
        return {sample.path for sample in self.dropped}

    def describes_pixels(self) -> bool:
        """Return True if the record has the hash and the views of each crop, which records of earlier versions lack."""
        return all(sample.pixels for sample in (*self.samples, *self.dropped))


def tar_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard."""
    return folder / f"shard-{shard:05d}.tar"


def record_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard's record."""
    return folder / f"shard-{shard:05d}.json"


def sample_key(shard: int, number: int) -> str:
    """Return the key of a sample from its number in its shard. Keys are unique in the whole set."""
    return f"{shard:05d}-{number:0{KEY_DIGITS}d}"


def write_record(folder: Path, record: ShardRecord) -> None:
    """Write a shard's record; the shard itself is written first."""
    plain = vars(record) | {"quarantined": [vars(row) for row in record.quarantined]}
    for name in ("samples", "dropped"):  # An empty pixel_size is omitted, so that records of pictures keep their bytes.
        plain[name] = [{k: v for k, v in vars(sample).items() if k != "pixel_size" or v} for sample in plain[name]]
    write_json(record_path(folder, record.shard), plain)


def read_record(folder: Path, shard: int) -> ShardRecord:
    """Return a shard's record. Raises ValueError when it is missing, damaged or of another format."""
    path = record_path(folder, shard)
    data = read_json(path)
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"{path} has format {data['format']}; this version reads format {FORMAT}. Run crop again.")
        samples = _samples(data.pop("samples"))
        dropped = _samples(data.pop("dropped", []))
        quarantined = [Quarantined(**entry) for entry in data.pop("quarantined")]
        return ShardRecord(samples=samples, quarantined=quarantined, dropped=dropped, **data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it and run the stage again.") from None


def _samples(entries: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(**{**entry, "size": tuple(entry["size"])}) for entry in entries]


def reusable_record(folder: Path, shard: int, made_from: str) -> ShardRecord | None:
    """Return the record of a shard that is up to date, with verified bytes; None if the shard must be written."""
    try:
        record = read_record(folder, shard)
        path = tar_path(folder, shard)
        # Size before content: hashing a shard of several gigabytes takes seconds.
        if record.made_from != made_from or path.stat().st_size != record.bytes:
            return None
        return record if sha256_file(path) == record.sha256 else None
    except (ValueError, OSError):
        return None


def index_of(record: ShardRecord) -> NDArray[np.void]:
    """Return the index entries of the samples of a shard, `INDEX` [num_samples]."""
    return np.array([(sample.label or 0, int(sample.sha256[:16], 16)) for sample in record.samples], dtype=INDEX)


def write_index(path: Path, indices: Iterable[NDArray[np.void]]) -> None:
    """Write the index of a set as one `.npy` file, from the indices of its shards (`index_of`) in order."""
    with atomic_write(path) as file:
        np.save(file, np.concatenate([np.empty(0, dtype=INDEX), *indices]), allow_pickle=False)


def read_index(path: Path) -> NDArray[np.void]:
    """Return the index of a set. Raises ValueError when it is missing or damaged."""
    try:
        index: NDArray[np.void] = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist. Run the stage that writes {path.parent} again.") from None
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}. Run the stage that writes {path.parent} again.") from None
    if index.dtype != INDEX:
        raise ValueError(f"{path} is damaged: it holds {index.dtype}. Run the stage that writes {path.parent} again.")
    return index


def share_of_hashes(fraction: float) -> np.uint64:
    """Return the hash below which this share of all hashes lies."""
    return np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))


def describe_shards(layout: Layout, records: Sequence[ShardRecord]) -> dict[str, Any]:
    """Return the part of a manifest that describes the layout, which crops and latents have in common."""
    return {
        "shape": list(layout.shape),
        "dtype": layout.dtype,
        "offsets": layout.offsets(),
        "stride": layout.stride,
        "num_samples": sum(record.num_samples for record in records),
        "shards": [
            {
                "file": tar_path(Path(), record.shard).name,
                "sha256": record.sha256,
                "bytes": record.bytes,
                "num_samples": record.num_samples,
            }
            for record in records
        ],
    }


def describe_files(folder: Path, num_shards: int, others: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the part of a manifest with the sha256 of the index, and of the records and others by their names."""
    records = [record_path(folder, shard) for shard in range(num_shards)]
    return {"index": sha256_file(folder / "index.npy"), "files": describe(folder, [*records, *others])}


def write_quarantine(path: Path, bad: Iterable[Quarantined]) -> None:
    """Write a readable table of the files without a sample and the reasons."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["path", "reason", "sha256"])
    table.writerows([row.path, row.reason, row.sha256] for row in bad)
    write_text(path, text.getvalue())


def read_unwanted(path: Path) -> list[Quarantined]:
    """Read from the table the images that `data.keep` excluded. Raises ValueError when the table is missing."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Run crop again.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [Quarantined(row["path"], row["reason"], row["sha256"]) for row in csv.DictReader(file)]
    return [row for row in rows if row.reason.startswith(UNWANTED)]


def class_histogram(records: Iterable[ShardRecord], num_classes: int) -> list[int]:
    """Return the number of samples of each class, by its number."""
    counts = [0] * num_classes
    for record in records:
        for label, count in record.histogram.items():
            counts[int(label)] += count
    return counts


def remove_surplus(folder: Path, num_shards: int) -> None:
    """Delete the surplus shards and records of an earlier run with more shards."""
    wanted = {path(folder, shard).name for shard in range(num_shards) for path in (tar_path, record_path)}
    for path in folder.glob("shard-*"):
        if path.suffix in (".tar", ".json") and path.name not in wanted:
            path.unlink()


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
