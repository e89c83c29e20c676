"""Pictures for people: images side by side, written as PNG."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from image_diffusion.core.files import atomic_write

_SMALLEST = 64  # pixels along an edge of an image in a grid, at least
_GAP = 2  # pixels between images
_BETWEEN = 128  # their grey


def grid_columns(num_images: int, num_classes: int) -> int:
    """A column for each class while that makes a picture one can look at; else as many columns as rows."""
    return num_classes if 1 < num_classes <= 12 else math.ceil(num_images**0.5)


def image_grid(images: Tensor, columns: int) -> Image.Image:
    """Uint8 [N, C, H, W] side by side, `columns` in a row; small images are enlarged by a whole number."""
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    factor = -(-_SMALLEST // height)
    height, width = factor * height + _GAP, factor * width + _GAP
    canvas = torch.full((rows * columns, channels, height, width), _BETWEEN, dtype=torch.uint8)
    enlarged = images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    canvas[:count, :, : height - _GAP, : width - _GAP] = enlarged
    tiled = canvas.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    array = tiled.reshape(rows * height, columns * width, channels).numpy()
    return Image.fromarray(array[:, :, 0] if channels == 1 else array)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG atomically."""
    with atomic_write(path) as file:
        picture.save(file, format="PNG")
