"""Reader of a set of shards: memory-mapped, with random access by an offset and a stride, without an index of
positions.

A set lies in a folder of this machine, or behind a URL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.atomic import digest, read_json
from image_diffusion.core.files.checksums import Inspection, check_files, manifest_digest
from image_diffusion.core.files.mirrored import fetch_missing
from image_diffusion.core.levels import Levels
from image_diffusion.core.names import inside
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.core.process.secrets import without_credentials
from image_diffusion.data.shards.manifest import check_manifest
from image_diffusion.data.shards.mmap import Region
from image_diffusion.data.shards.records import read_index, share_of_hashes
from image_diffusion.data.shards.remote import Remote, cache_folder
from image_diffusion.data.shards.tar_layout import BLOCK, Layout

Split = Literal["train", "validation", "test", "all"]

_DTYPES = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "int32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
}
_ADVICE = "Run the stage that writes it again."
_AT_ONCE = 8
"""Number of shards that are fetched concurrently."""


class Shards:
    """The samples of one split of a set of shards, numbered from 0 in the order of the shards.

    num_samples: N, of the split. labels: int64 [N], 0 without classes. classes: names by number. num_classes: 0 without
    classes. shape, dtype: of one stored sample. levels: of array crops; None for other samples. manifest: the set's
    manifest. digest: from `manifest_digest`. joined_sets: other sets that were joined to this one, sample by sample, by
    their kind. renders: see `open_shards`."""

    def __init__(
        self,
        folder: Path | Remote,
        manifest: dict[str, Any],
        split: Split,
        inspection: Inspection | None = None,
        renders: bool = False,
    ) -> None:
        self.manifest, self._inspection, self._renders = manifest, inspection, renders
        self.levels = Levels(**manifest["levels"]) if manifest.get("levels") else None
        self.digest = manifest_digest(manifest)
        self.joined_sets: dict[str, Shards] = {}
        self.shape = tuple(manifest["shape"])
        self.dtype = _DTYPES[manifest["dtype"]]
        self.classes: list[str] = manifest["classes"]
        self.num_classes = len(self.classes)
        entries = manifest["shards"]
        self._folder = folder
        index = self._read_index()
        counts = np.array([entry["num_samples"] for entry in entries], dtype=np.int64)
        chosen = _in_split(index["content"], manifest, split)
        self.labels: NDArray[np.int64] = index["label"][chosen].astype(np.int64)
        self.num_samples = len(chosen)
        self._chosen = chosen

        # A tar consists of blocks, and every array begins at the same offset in a block. So the consecutive shards are
        # a table with a row for each block, most of them unused, and a gather is one selection of rows.
        self._region = Region([entry["bytes"] for entry in entries])
        self._missing = np.ones(len(entries), dtype=np.bool_)
        if isinstance(folder, Path) and inspection is not None:
            self._put(dict(enumerate(_paths(folder, entries))))
        offsets: dict[str, int] = manifest["offsets"]
        self._table = _rows(self._region.bytes, offsets["npy"] % BLOCK, self.shape, self.dtype)
        first = np.cumsum(counts) - counts
        self._shard = np.repeat(np.arange(len(counts)), counts)[chosen]
        starts = self._region.starts[self._shard] + (chosen - first[self._shard]) * manifest["stride"]
        self._row: NDArray[np.int64] = (starts + offsets["npy"]) // BLOCK
        self._mirror_offset = (offsets["flip.npy"] - offsets["npy"]) // BLOCK if "flip.npy" in offsets else None

    def untrained(self) -> list[str]:
        """Return the names of the classes without a sample in this split."""
        counts = np.bincount(self.labels, minlength=self.num_classes)[: self.num_classes]
        return [name for name, count in zip(self.classes, counts.tolist(), strict=True) if not count]

    def gather(
        self, indices: NDArray[np.int64], flip: NDArray[np.bool_] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return samples by number, [B, *shape], of the mirrored image where `flip` [B] is true.

        If the set stores mirrored samples, they are read; crops are mirrored here. out: a contiguous CPU tensor [>= B,
        *shape] whose first B rows are filled and returned, so that memory can be reused. Raises ValueError when a shard
        cannot be fetched or is damaged.
        """
        if self._inspection is not None:
            self._inspection.check()
        count = len(indices)
        out = torch.empty((count, *self.shape), dtype=self.dtype) if out is None else out[:count]
        if self._missing.any():
            self._fetch(np.unique(self._shard[indices]))
        rows = self._row[indices]
        if flip is not None and self._mirror_offset is not None:
            rows = rows + flip * self._mirror_offset
        torch.index_select(self._table, 0, torch.from_numpy(rows), out=out.view(count, self._table.shape[1]))
        if flip is not None and self._mirror_offset is None and flip.any():
            mirrored = torch.from_numpy(np.flatnonzero(flip))
            # PyTorch cannot write rows of uint16; as int16 they are the same bits.
            bits = out.view(torch.int16) if self.dtype == torch.uint16 else out
            bits[mirrored] = bits[mirrored].flip(-1)
        return out if not self._renders or self.levels is None else self.levels.rendered(out)

    @property
    def selection(self) -> str:
        """Return a digest of the selected samples, in order, of this set and of the joined sets. Unlike `digest`, it
        changes with the selection of held-out samples."""
        return digest([sha256(shards._chosen.tobytes()).hexdigest() for shards in (self, *self.joined_sets.values())])

    @property
    def has_mirror_images(self) -> bool:
        """True if samples can be mirrored: crops and images always, others if the mirrored samples are stored."""
        return self._mirror_offset is not None or self.manifest["kind"] in ("crops", "images")

    def carried(self) -> dict[str, Path]:
        """Return the local paths of the files that belong to models trained on the set, by name.

        Raises ValueError for a file that cannot be fetched, is damaged, or lies outside the set's folder.
        """
        files: dict[str, str] = self.manifest.get("carried", {})
        if isinstance(self._folder, Path):
            check_files(self._folder, files, _ADVICE)
            return {name: inside(self._folder, name) for name in files}
        return {name: self._folder.fetch(name, sha256) for name, sha256 in files.items()}

    def held_out(self) -> NDArray[np.bool_]:
        """True for each of these samples that the set keeps from training, [N]."""
        index = self._read_index()
        train = _in_split(index["content"], self.manifest, "train")
        kept = np.ones(len(index), dtype=np.bool_)
        kept[train] = False
        return kept[self._chosen]

    def gather_joined(self, indices: NDArray[np.int64], flip: NDArray[np.bool_] | None = None) -> tuple[Tensor, ...]:
        """Return the entries of these samples in each joined set, in the order of joining. Where `flip` [B] is true,
        they are of the mirrored image, unless the set's data have none, such as words."""
        return tuple(
            other.gather(indices, flip if other.has_mirror_images else None) for other in self.joined_sets.values()
        )

    def gather_of(self, kind: str, indices: NDArray[np.int64]) -> Tensor:
        """Return the entries of these samples in the joined set of this kind, [B, …]."""
        return self.joined_sets[kind].gather(indices)

    def join(self, other: Shards) -> Shards:
        """Join another set: keep the samples that both sets have, by shard and id, also in the sets that were joined
        before. All sets hold the samples of a shard in the same order. Returns itself. Raises ValueError if the sets
        have no sample in common, or a set of this kind is already joined."""
        if other.manifest["kind"] in self.joined_sets:
            raise ValueError(f"Two sets hold {other.manifest['kind']}. Name one set of each kind.")
        mine, theirs = _common(self, other)
        if self.num_samples and not len(mine):
            raise ValueError(
                f"The {other.manifest['kind']} are of other images than the {self.manifest['kind']}: they have none in "
                f"common. Make both from the same crops."
            )
        for joined in (self, *self.joined_sets.values()):
            joined._take(mine)
        other._take(theirs)
        self.joined_sets[other.manifest["kind"]] = other
        self.digest = digest([self.digest, other.digest])
        return self

    def _take(self, rows: NDArray[np.int64]) -> None:
        """Keep only these samples, by number."""
        self.labels, self._shard, self._row = self.labels[rows], self._shard[rows], self._row[rows]
        self._chosen, self.num_samples = self._chosen[rows], len(rows)

    def hold(self) -> Shards:
        """Read every sample into memory once and gather from there. Returns itself."""
        self._fetch(np.unique(self._shard))
        rows = (
            self._row if self._mirror_offset is None else np.concatenate([self._row, self._row + self._mirror_offset])
        )
        self._table = self._table.index_select(0, torch.from_numpy(rows))
        self._row = np.arange(self.num_samples)
        self._mirror_offset = None if self._mirror_offset is None else self.num_samples
        return self

    def _read_index(self) -> NDArray[np.void]:
        """Read the index, a row for each sample of the set. Raises ValueError when it does not fit the manifest."""
        if isinstance(self._folder, Path):
            path = self._folder / "index.npy"
            index = read_index(path)
            check_files(self._folder, {"index.npy": self.manifest["index"]}, _ADVICE)
        else:
            self._folder.discard_damaged([self.manifest["index"]])
            path = self._folder.fetch("index.npy", self.manifest["index"])
            index = read_index(path)
        if len(index) != self.manifest["num_samples"]:
            raise ValueError(
                f"{path} lists {len(index):,} samples but the manifest {self.manifest['num_samples']:,}. {_ADVICE}"
            )
        unknown = index["label"][(index["label"] < 0) | (index["label"] >= self.num_classes)]
        if self.num_classes and len(unknown):
            raise ValueError(f"{path} gives class {unknown[0]} of {self.num_classes} to a sample. {_ADVICE}")
        return index

    def copy_to(self, folder: Path, first: int = 0) -> None:
        """Copy every shard into a folder, cyclically from shard `first`, and read each copy once it is complete; a
        concurrent `gather` continues with the original shards. Files are named by their sha256, which is verified:
        files that exist, also from another process, are not copied again. Raises ValueError when a shard cannot be
        copied."""
        if not isinstance(self._folder, Path):  # fetched shards are local files already
            return
        near = Remote(f"file://{self._folder.absolute()}", folder)
        entries = self.manifest["shards"]
        near.discard_damaged(entry["sha256"] for entry in entries)
        for number in range(first, first + len(entries)):
            entry = entries[number % len(entries)]
            self._put({number % len(entries): near.fetch(entry["file"], entry["sha256"], entry["bytes"])})

    def verified(self) -> None:
        """Wait until every local file of the set is verified by its hash. Raises ValueError."""
        if self._inspection is not None:
            self._inspection.wait()

    def _fetch(self, shards: NDArray[np.int64]) -> None:
        """Verify the missing shards and map them into memory."""
        wanted = shards[self._missing[shards]].tolist()
        if not wanted:
            return
        entries = [self.manifest["shards"][shard] for shard in wanted]
        if isinstance(self._folder, Path):
            check_files(self._folder, {entry["file"]: entry["sha256"] for entry in entries}, _ADVICE)
            self._put(dict(zip(wanted, _paths(self._folder, entries), strict=True)))
            return
        remote = self._folder
        if self._inspection is None:
            remote.discard_damaged(entry["sha256"] for entry in entries)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            paths = pool.map(lambda entry: remote.fetch(entry["file"], entry["sha256"], entry["bytes"]), entries)
            self._put(dict(zip(wanted, paths, strict=True)))

    def _put(self, paths: dict[int, Path]) -> None:
        for shard, path in paths.items():
            self._region.put(shard, path)
            self._check_header(shard, path)
            self._missing[shard] = False

    def _check_header(self, shard: int, path: Path) -> None:
        """Raise ValueError when the first array of a shard does not state the shape and type in the manifest."""
        names = tuple(self.manifest["offsets"])
        layout = Layout(names, self.shape, self.manifest["dtype"], labelled=self.num_classes > 0)
        end = int(self._region.starts[shard]) + layout.offsets()[names[0]]
        header = self._region.bytes[end - len(layout.header) : end].numpy().tobytes()
        if self.manifest["shards"][shard]["num_samples"] and header != layout.header:
            raise ValueError(
                f"{path} does not hold {self.manifest['dtype']} {list(self.shape)}, as the manifest says. {_ADVICE}"
            )


def open_shards(
    folder: Path | str,
    split: Split = "train",
    cache: Path | None = None,
    in_background: bool = False,
    renders: bool = False,
) -> Shards:
    """Open the set of shards in a folder that `crop` or `encode` wrote. Each file is verified by its hash before it is
    read, once per stamp (`core.verify`).

    folder: a path, or a URL, whose shards are fetched when first read and stored in `cache` (unset: see
    `remote.cache_folder`). Values and order are the same. split: the samples to read; validation and test are chosen by
    the hash of the content. in_background: verify all files now, or in the background if that takes long; `verified`
    waits for it. renders: return array crops as metrics see them, float32 from 0 to 255 (`Levels.rendered`). Raises
    ValueError when the set is missing, damaged, of another format or incomplete.
    """
    is_url = "://" in str(folder)
    where = Remote(str(folder), cache or cache_folder()) if is_url else Path(folder)
    path = without_credentials(f"{folder}/manifest.json") if is_url else f"{folder}/manifest.json"
    if isinstance(where, Path) and not Path(path).is_file():
        raise ValueError(f"{path} does not exist. Run the stage that writes {folder} first.")
    manifest = check_manifest(where.manifest() if isinstance(where, Remote) else read_json(Path(path)), path)
    hashes = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    if isinstance(where, Path):
        fetch_missing(where, hashes)
        for shard, file in zip(manifest["shards"], _paths(where, manifest["shards"]), strict=True):
            _check_size(file, shard["bytes"])
    inspection = None
    if in_background:
        inspection = where.inspect(hashes.values()) if isinstance(where, Remote) else Inspection(where, hashes, _ADVICE)
    return Shards(where, manifest, split, inspection, renders)


def _paths(folder: Path, entries: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Return the paths of shards from their entries in the manifest. Raises ValueError for a path outside the
    folder."""
    return [inside(folder, entry["file"], follow=True) for entry in entries]


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing. {_ADVICE}")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}. {_ADVICE}")


def _in_split(content: NDArray[np.uint64], manifest: Mapping[str, Any], split: Split) -> NDArray[np.int64]:
    """Return the numbers of the samples of a split: validation has the lowest hashes, test the next, train the rest.
    Regardless of their hash, the manifest's `not_held_out` are in train and its `held_out` in validation."""
    if split == "all":
        return np.arange(len(content))
    fraction = manifest["validation_fraction"]
    held_out = content < share_of_hashes(fraction + manifest.get("test_fraction", 0.0))
    validation = content < share_of_hashes(fraction)
    for numbers, is_held_out in ((manifest.get("not_held_out", []), False), (manifest.get("held_out", []), True)):
        held_out[numbers] = validation[numbers] = is_held_out
    return np.flatnonzero({"train": ~held_out, "validation": validation, "test": held_out & ~validation}[split])


def _rows(region: Tensor, lead: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a view with one row per block: the numbers of an array that begins at byte `lead` of it. Rows overlap."""
    numel = int(np.prod(shape, dtype=np.int64))
    numbers = region[lead : len(region) - (len(region) - lead) % dtype.itemsize].view(dtype)
    step = BLOCK // dtype.itemsize
    return numbers.as_strided((max(0, (len(numbers) - numel) // step + 1), numel), (step, 1))


def _common(first: Shards, second: Shards) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the samples that two sets share, in the order of the first. If one set lacks some of
    several equal samples, they cannot be matched: they are left out, and their number is logged."""
    keys, others = _keys(first), _keys(second)
    _, mine, theirs = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    order = np.argsort(mine)
    rest, place = np.delete(keys, mine), ["shard", "content"]
    others = others[np.isin(others["content"], rest["content"])]
    unclear = int(np.isin(repack_fields(rest[place]), repack_fields(others[place])).sum())
    if unclear:
        kinds = first.manifest["kind"], second.manifest["kind"]
        log_line_once(
            f"warning: {unclear:,} of {first.num_samples:,} {kinds[0]} are left out: of equal images in a shard some "
            f"have no {kinds[1]}."
        )
    return mine[order], theirs[order]


def _keys(shards: Shards) -> NDArray[np.void]:
    """Return a unique key of each sample: its shard, its content, its index among the equal samples of the shard, and
    their number, in all splits together."""
    content = shards._read_index()["content"]
    counts = [entry["num_samples"] for entry in shards.manifest["shards"]]
    number = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((content, number))  # stable
    begins = np.ones(len(content), dtype=np.bool_)
    begins[1:] = (number[order][1:] != number[order][:-1]) | (content[order][1:] != content[order][:-1])
    firsts = np.flatnonzero(begins)
    equal = np.diff(firsts, append=len(content))
    keys = np.empty(len(content), dtype=[("shard", "<i8"), ("content", "<u8"), ("nth", "<i8"), ("equal", "<i8")])
    keys["shard"], keys["content"] = number, content
    keys["nth"][order] = np.arange(len(content)) - np.repeat(firsts, equal)
    keys["equal"][order] = np.repeat(equal, equal)
    chosen: NDArray[np.void] = keys[shards._chosen]
    return chosen
