"""Pictures for people, beside the manifests: what the crops look like, what the latents keep of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from image_diffusion.core.figures import new_figure, save_figure
from image_diffusion.core.files import atomic_write
from image_diffusion.data.records import ShardRecord
from image_diffusion.data.shards import Shards

_LINE = 14  # pixels, height of a line of text


def contact_sheet(dataset: Shards, path: Path, max_rows: int = 20, columns: int = 12, tile: int = 96) -> None:
    """Write a sheet of crops as PNG: a row a class with its name and count, or plain rows without classes.

    Shows classes spread evenly over all of them, and of each its first images.
    """
    groups: list[tuple[str, NDArray[np.int64]]] = []
    if dataset.num_classes:
        spread = np.linspace(0, dataset.num_classes - 1, min(max_rows, dataset.num_classes)).round()
        for label in spread.astype(int).tolist():
            members = np.flatnonzero(dataset.labels == label)
            groups.append((f"{dataset.classes[label]} ({len(members):,})", members[:columns]))
    else:
        shown = np.arange(min(dataset.num_samples, max_rows * columns))
        groups = [("", shown[start : start + columns]) for start in range(0, len(shown), columns)]
    rows = [(title, list(dataset.gather(members).numpy())) for title, members in groups]
    _write(_sheet(rows, tile), path)


def reconstruction_sheet(
    images: NDArray[np.uint8], decoded: NDArray[np.uint8], path: Path, tile: int = 128, gain: int = 4
) -> None:
    """Write a sheet as PNG: images, the same decoded from their latents, and the difference times `gain`.

    images, decoded: uint8 [B, C, H, W].
    """
    difference = np.abs(images.astype(np.int16) - decoded.astype(np.int16)) * gain
    rows = [
        ("image", list(images)),
        ("decoded from its latent", list(decoded)),
        (f"difference x {gain}", list(difference.clip(0, 255).astype(np.uint8))),
    ]
    _write(_sheet(rows, tile), path)


def histograms(classes: Sequence[str], counts: Sequence[int], records: Sequence[ShardRecord], path: Path) -> None:
    """Write, as one PNG, how many images each class has and how large the source images are."""
    sides = np.array([min(sample.size) for record in records for sample in record.samples if sample.view == 0])
    figure = new_figure(11, 4)
    by_class, by_size = figure.subplots(1, 2)
    if classes:
        order = np.argsort(counts)[::-1]
        by_class.bar(np.arange(len(counts)), np.array(counts)[order], width=1.0, color="#4878a8")
        if len(classes) <= 30:
            by_class.set_xticks(np.arange(len(classes)), [classes[i] for i in order], rotation=60, ha="right")
        by_class.set(title=f"{len(classes):,} classes", xlabel="class, most frequent first", ylabel="images")
    else:
        by_class.bar([0], [len(sides)], color="#4878a8")
        by_class.set(title="no classes", xticks=[], ylabel="images")
    by_size.hist(sides, bins=40, color="#a86848")
    by_size.set(title="size of the source images", xlabel="shorter side, pixels", ylabel="images")
    save_figure(figure, path)


def titled_rows(rows: list[tuple[str, list[NDArray[np.uint8]]]], path: Path, tile: int = 96) -> None:
    """Write rows of crops [C, H, W], each under its title, as PNG."""
    _write(_sheet(rows, tile), path)


def _sheet(rows: list[tuple[str, list[NDArray[np.uint8]]]], tile: int) -> Image.Image:
    """Rows of images [C, H, W], each under its title."""
    gap = 2
    height = sum(tile + gap + (_LINE if title else 0) for title, _ in rows)
    width = max([1, *(len(images) for _, images in rows)]) * (tile + gap)
    sheet = Image.new("RGB", (width, max(height, 1)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=_LINE - 3)
    top = 0
    for title, images in rows:
        if title:
            draw.text((2, top), title, fill="black", font=font)
            top += _LINE
        for column, image in enumerate(images):
            sheet.paste(_as_rgb(image).resize((tile, tile), Image.Resampling.BICUBIC), (column * (tile + gap), top))
        top += tile + gap
    return sheet


def _as_rgb(image: NDArray[np.uint8]) -> Image.Image:
    """A crop of 1 to 4 channels as an RGB picture; alpha is shown over white."""
    pixels = image.transpose(1, 2, 0)
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if picture.mode in ("LA", "RGBA"):
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture.convert("RGB")


def _write(sheet: Image.Image, path: Path) -> None:
    with atomic_write(path) as file:
        sheet.save(file, format="png")
