"""Images as an `.npz`, written and read without ever being in memory as a whole."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files import ZIP_FAULTS, atomic_write

_LOCAL_HEADER = 30  # bytes in front of a member's name, APPNOTE.TXT 4.3.7


def save_samples(path: Path, images: Tensor, labels: Tensor | None) -> None:
    """Write uint8 [N, C, H, W] and int64 [N] as ADM's evaluator reads them: arr_0 [N, H, W, C] and, if any, arr_1."""
    stream_samples(path, [images], len(images), labels)


def stream_samples(path: Path, batches: Iterable[Tensor], count: int, labels: Tensor | None) -> None:
    """`save_samples` of images that come batch by batch, [B, C, H, W], `count` of them in all; the same bytes. Vectors
    [B, dim] are written as they are."""
    with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
        written = 0
        with _member(archive, "arr_0") as member:
            for batch in batches:
                rows = batch.movedim(1, -1).contiguous().numpy()
                if written == 0:
                    _write_header(member, rows.dtype, (count, *rows.shape[1:]))
                member.write(rows.data)
                written += len(rows)
        assert written == count
        if labels is not None:
            with _member(archive, "arr_1") as member:
                _write_header(member, np.dtype(np.int64), tuple(labels.shape))
                member.write(labels.contiguous().numpy().data)


class ImageDigests:
    """The sha256 of images that pass batch by batch: of that of each image, [H, W, C], in order. So those who share the
    images can tell it together."""

    def __init__(self) -> None:
        self._each: list[bytes] = []

    def passed(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches, [B, C, H, W]."""
        for batch in batches:
            self._each += digests_of(batch.movedim(1, -1).contiguous().numpy())
            yield batch

    @property
    def of_all(self) -> str:
        """In hexadecimal, of what has passed."""
        return digest_of(self._each)


def digests_of(images: NDArray[Any]) -> list[bytes]:
    """The sha256 of each image, [N, H, W, C]."""
    return [hashlib.sha256(np.ascontiguousarray(image).data).digest() for image in images]


def digest_of(digests: Iterable[bytes]) -> str:
    """The sha256 of those of images, in hexadecimal."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an `.npz`, by name, every byte compared with its checksum; what is not compressed is read from the
    file when it is touched.

    Raises ValueError when there is no such file, or it is not whole.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays, zipfile.ZipFile(path) as archive:
            return {name: _mapped(path, archive, name) if _maps(archive, name) else arrays[name] for name in arrays}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (*ZIP_FAULTS, TypeError) as error:
        raise ValueError(f"{path} is not a whole .npz file: {error}. Write it again.") from None


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)


def _write_header(member: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(
        member, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )


def _maps(archive: zipfile.ZipFile, name: str) -> bool:
    if f"{name}.npy" not in archive.namelist():
        return False
    info = archive.getinfo(f"{name}.npy")
    return info.compress_type == zipfile.ZIP_STORED and info.file_size > 0


def _mapped(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = archive.getinfo(f"{name}.npy")
    start = member.header_offset
    with path.open("rb") as file:
        file.seek(start)
        header = file.read(_LOCAL_HEADER)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = file.seek(start + _LOCAL_HEADER + lengths)
        if _crc32(file, member.file_size) != member.CRC:
            raise ValueError(f"the checksum of {name} is not that of its bytes")
        file.seek(begin)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects.")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _crc32(file: IO[bytes], size: int) -> int:
    """The checksum of the next bytes of a file."""
    found = 0
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        found, size = zlib.crc32(block, found), size - len(block)
    return found
