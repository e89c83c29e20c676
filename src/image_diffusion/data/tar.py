"""Whole runs of equal samples as the bytes of a tar file, without a loop over samples.

The bytes are those of webdataset's own `ShardWriter(mtime=0)`: plain ustar, members sorted by extension, the key in
front of the first dot. Since every sample of a shard has the same members of the same size, a sample's bytes lie at a
fixed offset and stride, and a reader needs no index beyond those two numbers.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = tarfile.BLOCKSIZE
KEY_DIGITS = 6
MAX_SAMPLES = 10**KEY_DIGITS
"""Samples a shard can hold: their number is part of the key, in a fixed number of digits."""


@dataclass(frozen=True)
class Layout:
    """Where a sample's arrays lie in a shard.

    members: by extension without the `.npy` suffix's dot, e.g. "npy" and "flip.npy": shape and dtype are shared.
    shape, dtype: of one array. labelled: whether each sample has a `.cls` member with its class as digits.
    """

    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    labelled: bool

    @property
    def header(self) -> bytes:
        """What stands in front of the numbers in an `.npy` file."""
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            buffer, {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": self.shape}
        )
        return buffer.getvalue()

    @property
    def nbytes(self) -> int:
        """Bytes of one array's numbers."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def member_bytes(self) -> int:
        """Bytes of one array in the tar: tar header, `.npy` header, numbers, padding."""
        return BLOCK + _padded(len(self.header) + self.nbytes)

    @property
    def stride(self) -> int:
        """Bytes from one sample to the next."""
        return 2 * BLOCK * self.labelled + self.member_bytes * len(self.members)

    def offsets(self) -> dict[str, int]:
        """Bytes from the start of a sample to the numbers of each array."""
        first = 2 * BLOCK * self.labelled + BLOCK + len(self.header)
        return {name: first + i * self.member_bytes for i, name in enumerate(sorted(self.members))}

    def file_bytes(self, num_samples: int) -> int:
        """Size of a shard: its samples, two empty blocks, and padding to a whole tar record."""
        return -(-(num_samples * self.stride + 2 * BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE

    def samples(
        self, arrays: Mapping[str, NDArray[np.generic]], labels: NDArray[np.int64], prefix: str, first: int
    ) -> NDArray[np.uint8]:
        """The bytes of n samples, uint8 [n, stride].

        arrays: each [n, *shape]. labels: [n], not read when the layout is not labelled. Keys are
        `<prefix><number>`, numbered from `first`.
        """
        count = len(labels)
        out = np.zeros((count, self.stride), dtype=np.uint8)
        numbers = np.arange(first, first + count)
        at = 0
        if self.labelled:
            digits, sizes = _decimal(labels)
            _headers(out[:, :BLOCK], prefix, numbers, "cls", sizes)
            out[:, BLOCK : BLOCK + digits.shape[1]] = digits
            at = 2 * BLOCK
        header = np.frombuffer(self.header, dtype=np.uint8)
        sizes = np.full(count, len(header) + self.nbytes)
        for name in sorted(self.members):
            _headers(out[:, at : at + BLOCK], prefix, numbers, name, sizes)
            start = at + BLOCK + len(header)
            out[:, at + BLOCK : start] = header
            numbers_in = np.ascontiguousarray(arrays[name], dtype=np.dtype(self.dtype)).reshape(
                count, int(np.prod(self.shape, dtype=np.int64))
            )
            out[:, start : start + self.nbytes] = numbers_in.view(np.uint8)
            at += self.member_bytes
        return out


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _decimal(values: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Non-negative integers as decimal digits, uint8 [n, most digits] padded with zero bytes, and their lengths."""
    text = values.astype(np.int64).astype("S")
    width = max(text.dtype.itemsize, 1)
    digits = np.frombuffer(text.tobytes(), dtype=np.uint8).reshape(len(values), width)
    width = int((digits != 0).sum(axis=1).max(initial=1))
    return digits[:, :width], (digits != 0).sum(axis=1)


def _headers(
    out: NDArray[np.uint8], prefix: str, numbers: NDArray[np.int64], extension: str, sizes: NDArray[np.int64]
) -> None:
    """Write n tar headers into out [n, 512]: one made by `tarfile`, with name, size and checksum filled in."""
    info = tarfile.TarInfo(f"{prefix}{0:0{KEY_DIGITS}d}.{extension}")
    info.mode, info.uname, info.gname = 0o444, "bigdata", "bigdata"
    out[:] = np.frombuffer(info.tobuf(tarfile.USTAR_FORMAT), dtype=np.uint8)
    _digits(out[:, len(prefix) : len(prefix) + KEY_DIGITS], numbers, 10)
    _digits(out[:, 124:135], sizes, 8)
    out[:, 148:156] = ord(" ")
    _digits(out[:, 148:154], out.sum(axis=1, dtype=np.int64), 8)
    out[:, 154] = 0


def _digits(out: NDArray[np.uint8], values: NDArray[np.int64], base: int) -> None:
    """Write non-negative integers into out [n, width] as digits of a base, with leading zeros."""
    width = out.shape[1]
    for column in range(width):
        out[:, column] = ord("0") + values // base ** (width - 1 - column) % base
