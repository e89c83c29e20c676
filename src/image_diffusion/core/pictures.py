"""Pictures for people: images side by side, written as PNG."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from image_diffusion.core.files import atomic_write

_SMALLEST = 64  # pixels along an edge of an image in a grid


def image_grid(images: Tensor, columns: int) -> Image.Image:
    """Uint8 [N, C, H, W] side by side, `columns` in a row; small images are enlarged by a whole number."""
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    canvas = torch.full((rows * columns, channels, height, width), 255, dtype=torch.uint8)
    canvas[:count] = images
    tiled = canvas.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    array = tiled.reshape(rows * height, columns * width, channels).numpy()
    picture = Image.fromarray(array[:, :, 0] if channels == 1 else array)
    factor = -(-_SMALLEST // height)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG atomically."""
    with atomic_write(path) as file:
        picture.save(file, format="PNG")
