"""The ADM centre crop: any image -> a crop of a stated size.

Dhariwal and Nichol 2021 (guided-diffusion, also DiT and EDM2): halve with a box filter while the shorter side is at
least twice the target, scale bicubically so that the shorter side equals the target, cut out the centre. For a
rectangular target, "the shorter side" is the one with the smaller ratio to the target's.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.resolution import Size, height_width
from image_diffusion.data.crop import native_resize

Resampling = Image.Resampling


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
    if image.mode in native_resize.BYTES and is_compiled():
        image.load()
        with suppress(ValueError):
            return compiled_crop(native_resize.Pixels(image), resolution)
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


def compiled_crop(pixels: native_resize.Pixels, resolution: int | Size) -> NDArray[np.uint8]:
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
    if native_resize.library() is None:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (120, 120, 3), dtype=np.uint8)
    images = [Image.fromarray(noise[:height, :width]) for width, height in ((97, 41), (41, 97), (23, 120))]
    return all(
        (compiled_crop(native_resize.Pixels(image), 16) == np.asarray(pillow_crop(image, 16))).all() for image in images
    )
