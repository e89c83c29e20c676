"""Grids of images, and plots, written as PNG. matplotlib is imported only to draw a plot, since its import takes longer
than many stages."""

from __future__ import annotations

import math
import textwrap
from colorsys import hsv_to_rgb
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from image_diffusion.core.files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALLEST = 64  # pixels along an edge of an image in a grid, at least
_GAP = 2  # pixels between images
_BETWEEN = 128  # their grey
_TITLED, _LINE, _LETTER, _LINES = 112, 15, 6, 4  # pixels of a titled image, a line and a letter; lines at most


def grid_columns(num_images: int, num_classes: int) -> int:
    """Return the number of columns of a grid, about the number of its rows. With up to twelve classes it is a multiple
    of the number of classes, so that a column has one class."""
    side = math.sqrt(num_images)
    return num_classes * max(1, round(side / num_classes)) if 1 < num_classes <= 12 else math.ceil(side)


def as_pictures(images: Tensor) -> Tensor:
    """Return pictures, uint8 [N, C, H, W], as they are, and convert arrays, float from 0 to 255: one channel to grey,
    three to RGB, any other number to false colours: the sum of one hue of the colour circle for each channel, starting
    with red. The sum of a pixel is scaled to be as bright as its brightest channel."""
    if images.dtype == torch.uint8:
        return images
    channels = images.shape[1]
    if channels not in (1, 3):
        hues = torch.tensor([hsv_to_rgb(channel / channels, 1, 1) for channel in range(channels)])  # [C, 3]
        images, brightest = torch.einsum("nchw,cr->nrhw", images.cpu(), hues), images.cpu().amax(1, keepdim=True)
        images *= brightest / images.amax(1, keepdim=True).clamp(min=1)
    return images.round().clamp(0, 255).to(torch.uint8)


def image_grid(images: Tensor, columns: int, titles: list[str] | None = None) -> Image.Image:
    """Draw a grid of images, converted by `as_pictures`, with `columns` in a row; small images are enlarged by an
    integer factor. titles: text below each image."""
    images = as_pictures(images)
    if titles:
        return _titled(images, columns, titles)
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


def _titled(images: Tensor, columns: int, titles: list[str]) -> Image.Image:
    """Draw images side by side, each with its title below."""
    pictures = [image_grid(image[None], 1) for image in images]
    width, height = pictures[0].size
    wide = max(width, _TITLED)
    lines = [textwrap.wrap(title, max(6, wide // _LETTER), max_lines=_LINES, placeholder=" …") for title in titles]
    below = _LINE * max(map(len, lines)) + _GAP
    rows = -(-len(pictures) // columns)
    canvas = Image.new("RGB", (columns * (wide + _GAP), rows * (height + below)), "white")
    draw, font = ImageDraw.Draw(canvas), font_of(_LINE - 5)
    for i, (picture, title) in enumerate(zip(pictures, lines, strict=True)):
        x, y = (i % columns) * (wide + _GAP), (i // columns) * (height + below)
        canvas.paste(picture.convert("RGB"), (x + (wide - width) // 2, y))
        draw.multiline_text((x + wide // 2, y + height), "\n".join(title), "black", font, "ma", align="center")
    return canvas


def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of texts in pictures, DejaVu Sans of matplotlib: Pillow's own has only the letters of ASCII.
    size: in pixels."""
    from matplotlib import get_data_path

    return ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG atomically."""
    with atomic_write(path) as file:
        picture.save(file, format="PNG")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, 100 pixels an inch; the same figure gives the same bytes."""
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None})
