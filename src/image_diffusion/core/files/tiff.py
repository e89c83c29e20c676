"""Arrays as OME-TIFF, which microscopy programs open as one stack."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.files.atomic import atomic_write


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
