"""The ADM centre crop: any image -> a crop of a stated size.

Dhariwal and Nichol 2021 (guided-diffusion, also DiT and EDM2): halve with a box filter while the shorter side is at
least twice the target, scale bicubically so that the shorter side equals the target, cut out the centre. For a
rectangular target, "the shorter side" is the one with the smaller ratio to the target's.

The resize is Pillow's, compiled with wider instructions and only for the part that a crop keeps (`resize.c`): the same
bytes, faster. Installing the package compiles it where it finds a C compiler. Elsewhere, and for other modes, Pillow
resizes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.native import library_path, load
from image_diffusion.core.resolution import Size, height_width

Resampling = Image.Resampling

_BYTES = {"L": 1, "RGB": 4}
"""Bytes of a pixel as Pillow holds it, of the modes that the compiled resize takes."""
_COMPILED = library_path(__name__, "resize.compiled")  # compiled by setup.py
_MOST = 2**31 - 1


def scaled_size(width: int, height: int, resolution: int | Size) -> tuple[int, int]:
    """Return the size (width, height) an image is scaled to before its centre is cut out, halvings included."""
    rows, columns = height_width(resolution)
    while _is_twice(width, height, rows, columns):
        width, height = width // 2, height // 2
    scale = max(rows / height, columns / width)
    return round(width * scale), round(height * scale)


def _is_twice(width: int, height: int, rows: int, columns: int) -> bool:
    return height >= 2 * rows and width >= 2 * columns


def halve(image: Image.Image, resolution: int | Size) -> Image.Image:
    """Halve the image with a box filter while both its sides are at least twice those of the crop. Labels (mode P) are
    unchanged: they have no mean, and one nearest-neighbour resize does not shift them, as several would."""
    if image.mode == "P":
        return image
    rows, columns = height_width(resolution)
    while _is_twice(*image.size, rows, columns):
        image = image.resize((image.width // 2, image.height // 2), resample=Resampling.BOX)
    return image


def centre_crop(image: Image.Image, resolution: int | Size) -> NDArray[np.uint8]:
    """Return the centre of the image, [H, W], or [H, W, C] of a mode with several bands.

    The bytes of the original formula. Pillow computes them where the compiled resize cannot: if it was not compiled, or
    for another version of Pillow; for an image in several blocks of memory; and for one with alpha, by which Pillow
    multiplies around each resize.
    """
    if image.mode in _BYTES and is_compiled():
        image.load()
        with suppress(ValueError):
            return compiled_crop(Pixels(image), resolution)
    return np.asarray(pillow_crop(image, resolution))


def pillow_crop(image: Image.Image, resolution: int | Size) -> Image.Image:
    """Compute the crop by Pillow, with less work on wide images: Pillow scales these along the rows first, so the
    columns that the crop throws away are cut off before they are scaled along the columns. (Pillow 13 scales along the
    columns first where that loses more than twice as many pixels, and multiplies by alpha around a whole resize: both
    are left to it.)"""
    rows, columns = height_width(resolution)
    image = halve(image, resolution)
    width, height = scaled_size(*image.size, resolution)
    left, top = (width - columns) // 2, (height - rows) // 2
    is_tall = image.height > height and image.height - height > 2 * (image.width - width)
    if width > columns and not is_tall and image.mode not in ("LA", "RGBA"):
        image = image.resize((width, image.height), resample=Resampling.BICUBIC)
        image = image.crop((left, 0, left + columns, image.height))
        left, width = 0, columns
    image = image.resize((width, height), resample=Resampling.BICUBIC)
    return image.crop((left, top, left + columns, top + rows))


def compiled_crop(pixels: Pixels, resolution: int | Size) -> NDArray[np.uint8]:
    """Compute the crop by the compiled resize."""
    rows, columns = height_width(resolution)
    while _is_twice(*pixels.size, rows, columns):
        half = pixels.size[0] // 2, pixels.size[1] // 2
        pixels.resize(half, is_bicubic=False, box=(0, 0, *half))
    width, height = scaled_size(*pixels.size, resolution)
    left, top = (width - columns) // 2, (height - rows) // 2
    return pixels.resize((width, height), is_bicubic=True, box=(left, top, columns, rows))


@cache
def is_compiled() -> bool:
    """True if a compiled resize is available and gives the bytes of the installed Pillow: tried on wide and tall
    images, which Pillow scales along different axes first since version 13."""
    if library() is None:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (120, 120, 3), dtype=np.uint8)
    images = [Image.fromarray(noise[:height, :width]) for width, height in ((97, 41), (41, 97), (23, 120))]
    return all((compiled_crop(Pixels(image), 16) == np.asarray(pillow_crop(image, 16))).all() for image in images)


@cache
def library() -> ctypes.CDLL | None:
    """Load the library that installing the package compiled; None where it was not compiled, or for another kind of
    machine, or where Pillow does not share pixels (before 11.2)."""
    loaded = load(_COMPILED) if hasattr(Image.Image, "__arrow_c_array__") else None
    if loaded is None:
        return None
    loaded.shared_pixels.restype = ctypes.c_void_p
    loaded.shared_pixels.argtypes = [ctypes.c_void_p]
    loaded.resize.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 10, ctypes.c_void_p]
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return loaded


class Pixels:
    """The pixels of an image, initially in Pillow's memory. Needs the library and one of the modes.

    Raises ValueError for an image that lies in several blocks of memory.
    """

    def __init__(self, image: Image.Image) -> None:
        loaded = library()
        assert loaded is not None
        self.size, self._library, self._bytes = image.size, loaded, _BYTES[image.mode]
        _, self._holder = image.__arrow_c_array__()
        array = ctypes.pythonapi.PyCapsule_GetPointer(self._holder, b"arrow_array")
        self._at: int = loaded.shared_pixels(array)

    def resize(self, size: tuple[int, int], is_bicubic: bool, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
        """Scale to a size (width, height), bicubically or by a box filter, and keep a box (left, top, width, height) of
        it. Returns it, too, as [height, width], or [height, width, 3] of RGB. Raises ValueError for sizes beyond 32
        bits."""
        if max(size) > _MOST:
            raise ValueError(f"an image of {size[0]} x {size[1]} pixels is beyond 32 bits")
        _, _, width, height = box
        kept = np.empty((height, width, self._bytes), dtype=np.uint8)
        where = self._at, self._bytes, *self.size, is_bicubic, *size, *box, kept.ctypes.data
        if self._library.resize(*where):
            raise MemoryError
        self.size, self._holder, self._at = (width, height), kept, kept.ctypes.data
        return kept[:, :, 0] if self._bytes == 1 else kept[:, :, :3]
