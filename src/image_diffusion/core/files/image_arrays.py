"""Images in one file: `.npz`, written and read without loading all of it into memory, and OME-TIFF, which microscopy
programs open as one stack."""

from __future__ import annotations

import hashlib
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.atomic import ZIP_FAULTS, atomic_write

_LOCAL_HEADER = 30  # bytes before a member's name, APPNOTE.TXT 4.3.7


def save_samples(path: Path, images: Tensor, labels: Tensor | None) -> None:
    """Write uint8 [N, C, H, W] and int64 [N] as ADM's evaluator reads them: arr_0 [N, H, W, C] and, if any, arr_1."""
    stream_samples(path, [images], len(images), labels)


def stream_samples(path: Path, batches: Iterable[Tensor], count: int, labels: Tensor | None) -> None:
    """Write `count` images from batches [B, C, H, W], or vectors [B, dim], with the same bytes as `save_samples`."""
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
    """Digest of a stream of batches of images: the sha256 of the sha256 of each image, [H, W, C], in order. Processes
    that share the images can thus compute it together."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []

    def passed(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the batches, [B, C, H, W], unchanged."""
        for batch in batches:
            self._digests += digests_of(batch.movedim(1, -1).contiguous().numpy())
            yield batch

    @property
    def combined(self) -> str:
        """Return the digest of all images so far, in hexadecimal."""
        return digest_of(self._digests)


def digests_of(images: NDArray[Any]) -> list[bytes]:
    """Return the sha256 of each image, [N, H, W, C]."""
    return [hashlib.sha256(np.ascontiguousarray(image).data).digest() for image in images]


def digest_of(digests: Iterable[bytes]) -> str:
    """Return the sha256 of the digests of images, in hexadecimal."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` by name, after verifying their checksums; uncompressed arrays are read from the
    file on access. Raises ValueError if the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays, zipfile.ZipFile(path) as archive:
            return {name: _mapped(path, archive, name) if _maps(archive, name) else arrays[name] for name in arrays}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (*ZIP_FAULTS, TypeError) as error:
        raise ValueError(f"{path} is damaged or not an .npz file: {error}. Write it again.") from None


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
            raise ValueError(f"the checksum of {name} does not match its bytes")
        file.seek(begin)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _crc32(file: IO[bytes], size: int) -> int:
    """Return the checksum of the next bytes of a file."""
    checksum = 0
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum


def write_tiff(
    path: Path, images: NDArray[Any], channels: Sequence[str], pixel_size: tuple[float, float] | None = None
) -> None:
    """Write images [N, H, W, C] as one file of axes TCYX, with the names of the channels. Equal images give equal
    bytes. One image is in memory at a time. pixel_size: height and width of a pixel in micrometres."""
    from tifffile import FileHandle, TiffWriter  # not for pictures

    count, height, width, num_channels = images.shape
    content = hashlib.sha256(repr((images.dtype, images.shape, tuple(channels))).encode())
    sizes = dict(zip(("PhysicalSizeY", "PhysicalSizeX"), pixel_size, strict=True)) if pixel_size else {}  # OME: in µm

    def planes() -> Iterator[NDArray[Any]]:
        for image in images:
            for channel in range(num_channels):
                yield np.ascontiguousarray(image[:, :, channel])

    # The temporary file's name is a number, which tifffile does not accept.
    with atomic_write(path) as file, TiffWriter(FileHandle(file, name=path.name), ome=True) as tiff:
        tiff.write(
            planes(),
            shape=(count, num_channels, height, width),
            dtype=images.dtype,
            photometric="minisblack",
            metadata={
                "axes": "TCYX",
                "Channel": {"Name": list(channels)},
                # By default it is drawn at random.
                "UUID": f"urn:uuid:{uuid.UUID(bytes=content.digest()[:16])}",
                **sizes,
            },
        )
