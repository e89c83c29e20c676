"""Pillow's resize, compiled with wider instructions and only for the part that a crop keeps (`resize.c`): the same
bytes, faster.

Installing the package compiles it where it finds a C compiler. Elsewhere, and for other modes, Pillow resizes.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.native import library_path, load

BYTES = {"L": 1, "RGB": 4}
"""Bytes of a pixel as Pillow holds it, of the modes that are resized here."""
_COMPILED = library_path(__name__, "resize.compiled")  # compiled by setup.py
_MOST = 2**31 - 1


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
        self.size, self._library, self._bytes = image.size, loaded, BYTES[image.mode]
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
