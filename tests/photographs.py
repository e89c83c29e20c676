"""Photographs for tests: tiles of the two that come with scikit-learn, and common edits of a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_diffusion.data.quality.duplicates import grey, image_views

SIDE = 106
FOLDER = Path(str(metadata.distribution("scikit-learn").locate_file("sklearn/datasets/images")))


def tiles(least_contrast: float = 25.0) -> list[Image.Image]:
    """Return tiles of 106 x 106 pixels that share no pixel, without those that are mostly sky."""
    found = []
    for name in ("china.jpg", "flower.jpg"):
        photograph = np.asarray(Image.open(FOLDER / name))
        for top in range(0, 427 - SIDE, SIDE):
            for left in range(0, 640 - SIDE, SIDE):
                pixels = photograph[top : top + SIDE, left : left + SIDE]
                if pixels.std() > least_contrast:
                    found.append(Image.fromarray(pixels))
    return found


def views(crop: NDArray[np.uint8]) -> str:
    """Return the views of a crop that `near_duplicates` compares."""
    return image_views(grey(crop)[None])[0]


def as_jpeg(image: Image.Image) -> Image.Image:
    """Save the picture once more, at quality 60."""
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=60)
    return Image.open(buffer).convert("RGB")


def resized(image: Image.Image) -> Image.Image:
    """Make the picture 10 % smaller."""
    return image.resize((round(image.width * 0.9), round(image.height * 0.9)), Image.Resampling.BICUBIC)


def trimmed(x: float, y: float) -> Callable[[Image.Image], Image.Image]:
    """Cut off 5 % of the width and height. x, y: the remaining part, 0 the left or upper, 1 the right or lower."""

    def trim(image: Image.Image) -> Image.Image:
        width, height = round(image.width * 0.95), round(image.height * 0.95)
        left, top = round((image.width - width) * x), round((image.height - height) * y)
        return image.crop((left, top, left + width, top + height))

    return trim


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "jpeg": as_jpeg,
    "resized": resized,
    "trimmed": trimmed(0.5, 0.5),
    "trimmed at a corner": trimmed(0, 1),
    "mirrored": ImageOps.mirror,
    "all of it": lambda image: as_jpeg(resized(trimmed(0.5, 0.5)(ImageOps.mirror(image)))),
}
