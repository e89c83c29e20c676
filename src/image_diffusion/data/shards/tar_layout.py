"""Layout of the samples in a shard: a tar as webdataset writes it, plain ustar, members sorted by extension.

Since every sample of a shard has the same members of the same size, a sample's bytes lie at a fixed offset and stride,
and a reader needs no index beyond those two numbers.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = tarfile.BLOCKSIZE
KEY_DIGITS = 6
MAX_SAMPLES = 10**KEY_DIGITS
"""Maximum number of samples in a shard: the number of a sample is part of its key, with a fixed number of digits."""


@dataclass(frozen=True)
class Layout:
    """Layout of a sample's arrays in a shard.

    members: extensions without the leading dot, e.g. "npy" and "flip.npy", which share shape and dtype.
    shape, dtype: of one array. labelled: whether each sample has a `.cls` member with its class as digits.
    """

    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    labelled: bool

    @property
    def header(self) -> bytes:
        """Return the header in front of the numbers in an `.npy` file."""
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            buffer, {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": self.shape}
        )
        return buffer.getvalue()

    @property
    def nbytes(self) -> int:
        """Return the size of one array's numbers in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def member_bytes(self) -> int:
        """Return the bytes of one array in the tar: tar header, `.npy` header, numbers, padding."""
        return BLOCK + -(-(len(self.header) + self.nbytes) // BLOCK) * BLOCK

    @property
    def stride(self) -> int:
        """Return the number of bytes from one sample to the next."""
        return 2 * BLOCK * self.labelled + self.member_bytes * len(self.members)

    def offsets(self) -> dict[str, int]:
        """Return the number of bytes from the start of a sample to the numbers of each array."""
        first = 2 * BLOCK * self.labelled + BLOCK + len(self.header)
        return {name: first + i * self.member_bytes for i, name in enumerate(sorted(self.members))}

    def file_bytes(self, num_samples: int) -> int:
        """Return the size of a shard in bytes: its samples, two empty blocks, and padding to a whole tar record."""
        return -(-(num_samples * self.stride + 2 * BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def read_array(path: Path, layout: Layout, row: int) -> NDArray[Any]:
    """Return the first array of one sample, read at its offset in a shard."""
    with path.open("rb") as file:
        file.seek(row * layout.stride + layout.offsets()[layout.members[0]])
        return np.frombuffer(file.read(layout.nbytes), layout.dtype).reshape(layout.shape)
