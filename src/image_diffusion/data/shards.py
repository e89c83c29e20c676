"""Reading a set of shards: memory-mapped, any sample at any time, with no index but an offset and a stride."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files import digest, read_json, sha256_file
from image_diffusion.data.records import FORMAT, content_digest, read_index

Split = Literal["train", "validation", "all"]

_DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "float32": torch.float32}


class Shards:
    """The samples of one split of a set of shards, numbered from 0 in the order of the shards.

    num_samples. labels: int64 [N], 0 without classes. classes: names by number. num_classes: 0 without classes.
    shape, dtype: of one stored sample. manifest: the set's manifest. digest: changes when any sample,
    its order or its split does.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: Split) -> None:
        self.manifest = manifest
        self.digest = content_digest(manifest)
        self.shape = tuple(manifest["shape"])
        self.dtype = _DTYPES[manifest["dtype"]]
        self.classes: list[str] = manifest["classes"]
        self.num_classes = len(self.classes)
        index = read_index(folder / "index.npy")
        counts = np.array([shard["num_samples"] for shard in manifest["shards"]], dtype=np.int64)
        if len(index) != counts.sum():
            raise ValueError(
                f"{folder / 'index.npy'} lists {len(index):,} samples but the manifest {counts.sum():,}. "
                f"Run the stage that writes {folder} again."
            )
        chosen = _in_split(index["content"], manifest["validation_fraction"], split)
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._shard = np.repeat(np.arange(len(counts)), counts)[chosen]
        self._start = (chosen - first[self._shard]) * manifest["stride"]
        self.labels: NDArray[np.int64] = index["label"][chosen].astype(np.int64)
        self.num_samples = len(chosen)
        self._size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self._plain: int = manifest["offsets"]["npy"]
        self._mirrored: int | None = manifest["offsets"].get("flip.npy")
        self._views = [_map(folder / shard["file"], shard["bytes"]) for shard in manifest["shards"]]
        self._held: dict[int, Tensor] = {}

    def gather(
        self, indices: NDArray[np.int64], flip: NDArray[np.bool_] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Samples by number, [B, *shape]; where `flip` [B] is true, of the mirrored image.

        A set that stores both reads the twin; crops are mirrored here. out: a contiguous CPU tensor [>= B, *shape]
        whose first B rows are filled and returned, so that memory can be reused.
        """
        count = len(indices)
        out = torch.empty((count, *self.shape), dtype=self.dtype) if out is None else out[:count]
        if flip is None or self._mirrored is None:
            offsets: NDArray[np.int64] | int = self._plain
        else:
            offsets = np.where(flip, self._mirrored, self._plain)
        if self._held:
            self._gather_held(indices, offsets, out)
        else:
            self._gather_mapped(indices, offsets, out)
        if flip is not None and self._mirrored is None and flip.any():
            rows = torch.from_numpy(np.flatnonzero(flip))
            out[rows] = out[rows].flip(-1)
        return out

    def hold(self) -> Shards:
        """Read every sample into memory once and gather from there. Returns itself."""
        everything = np.arange(self.num_samples)
        for offset in [self._plain] if self._mirrored is None else [self._plain, self._mirrored]:
            held = torch.empty((self.num_samples, *self.shape), dtype=self.dtype)
            self._gather_mapped(everything, offset, held)
            self._held[offset] = held
        return self

    def _gather_mapped(self, indices: NDArray[np.int64], offsets: NDArray[np.int64] | int, out: Tensor) -> None:
        shards = self._shard[indices].tolist()
        starts = (self._start[indices] + offsets).tolist()
        target = _bytes(out)
        views, size, at = self._views, self._size, 0
        for shard, start in zip(shards, starts, strict=True):
            target[at : at + size] = views[shard][start : start + size]
            at += size

    def _gather_held(self, indices: NDArray[np.int64], offsets: NDArray[np.int64] | int, out: Tensor) -> None:
        rows = torch.from_numpy(np.ascontiguousarray(indices))
        torch.index_select(self._held[self._plain], 0, rows, out=out)
        if self._mirrored is not None and not isinstance(offsets, int):
            twins = torch.from_numpy(np.flatnonzero(offsets == self._mirrored))
            out[twins] = self._held[self._mirrored][rows[twins]]


def open_shards(
    folder: Path, split: Split = "train", codec_identity: dict[str, Any] | None = None, verify: bool = False
) -> Shards:
    """Open the set of shards in a folder that `crop` or `encode` wrote.

    split: which samples; validation is chosen by the hash of the content. codec_identity: the codec they are about
    to be used with, checked against the one that wrote them. verify: also hash every shard and the index.
    Raises ValueError when the set is missing, damaged, of another format, incomplete, or of another codec.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Run the stage that writes {folder} first.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads. Run its stage again.")
    if codec_identity is not None and "codec" in manifest and manifest["codec"] != codec_identity:
        raise ValueError(
            f"The latents in {folder} were made by codec {_short(manifest['codec'])}, "
            f"not by {_short(codec_identity)}. Run encode with this codec, or train with theirs."
        )
    for shard in manifest["shards"]:
        _check(folder / shard["file"], shard, verify)
    if verify and sha256_file(folder / "index.npy") != manifest["index"]:
        raise ValueError(f"{folder / 'index.npy'} is damaged: its sha256 is not the manifest's. Run its stage again.")
    return Shards(folder, manifest, split)


def _check(path: Path, shard: dict[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing. Run the stage that writes it again.")
    if path.stat().st_size != shard["bytes"]:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, not {shard['bytes']:,}. Run the stage that writes it again."
        )
    if verify and sha256_file(path) != shard["sha256"]:
        raise ValueError(f"{path} is damaged: its sha256 is not the manifest's. Run the stage that writes it again.")


def _in_split(content: NDArray[np.uint64], validation_fraction: float, split: Split) -> NDArray[np.int64]:
    """The numbers of the samples of a split."""
    if split == "all":
        return np.arange(len(content))
    validation = content < np.uint64(min(int(validation_fraction * 2.0**64), 2**64 - 1))
    return np.flatnonzero(validation if split == "validation" else ~validation)


def _map(path: Path, size: int) -> memoryview:
    """A file's bytes, mapped. By torch, which keeps no descriptor open: a set may have thousands of shards."""
    return _bytes(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _short(identity: dict[str, Any]) -> str:
    return f"{identity.get('name', identity.get('type', 'unknown'))} ({digest(identity)[:12]})"
