"""Overview pictures next to the manifests: samples of the crops, and reconstructions from the latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from image_diffusion.core.files.atomic import atomic_write, write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.levels import Levels
from image_diffusion.core.pictures import as_pictures, font_of, new_figure, save_figure
from image_diffusion.data.shards.reader import Shards
from image_diffusion.data.shards.records import ShardRecord

_LINE = 14  # pixels, height of a line of text
_COLUMNS, _ROWS, _TILE = 10, 20, 96  # images of a row, rows, pixels along an edge of an image
_CROPS = 12  # crops in a row of the contact sheet
_RECONSTRUCTION, _GAIN = 128, 4  # pixels along an edge of a reconstruction, factor of its difference
_SAMPLED = 1000  # images of which the numbers are counted for the plot


def write_sheets(folder: Path, manifest: Mapping[str, Any], records: Sequence[ShardRecord]) -> list[Path]:
    """Write a contact sheet and histograms beside the manifest of crops, and note them in it; return their paths. Of
    arrays also the numbers of each channel."""
    dataset = Shards(folder, dict(manifest), "all", renders=True)
    sheet, plot = folder / "sheet.png", folder / "histograms.png"
    contact_sheet(dataset, sheet)
    histograms(dataset.classes, dataset.manifest["histogram"], records, plot)
    written = [sheet, plot]
    (folder / "channels.png").unlink(missing_ok=True)
    if dataset.levels is not None:
        channel_histograms(Shards(folder, dict(manifest), "all"), dataset.levels, folder / "channels.png")
        written.append(folder / "channels.png")
    pictures = {"files": {**manifest["files"], **describe(folder, written)}}
    write_json(folder / "manifest.json", {**manifest, **pictures})
    return written


def contact_sheet(dataset: Shards, path: Path) -> None:
    """Write a sheet of crops as PNG: a row a class with its name and count, or without classes a square of plain rows.

    Shows classes spread evenly over all of them, and of each its first images.
    """
    groups: list[tuple[str, NDArray[np.int64]]] = []
    if dataset.num_classes:
        spread = np.linspace(0, dataset.num_classes - 1, min(_ROWS, dataset.num_classes)).round()
        for label in spread.astype(int).tolist():
            members = np.flatnonzero(dataset.labels == label)
            groups.append((f"{dataset.classes[label]} ({len(members):,})", members[:_CROPS]))
    else:
        shown = np.arange(min(dataset.num_samples, _CROPS * _CROPS))
        groups = [("", shown[start : start + _CROPS]) for start in range(0, len(shown), _CROPS)]
    rows = [(title, list(dataset.gather(members).numpy())) for title, members in groups]
    _write_sheet(rows, _TILE, path)


def reconstruction_sheet(images: NDArray[Any], decoded: NDArray[Any], path: Path) -> None:
    """Write a sheet as PNG: images, the same decoded from their latents, and the difference times four.

    images, decoded: [B, C, H, W], pictures or arrays as `core.pictures.as_pictures` takes them.
    """
    difference = np.abs(images.astype(np.float32) - decoded.astype(np.float32)) * _GAIN
    rows = [
        ("image", list(images)),
        ("decoded from its latent", list(decoded)),
        (f"difference x {_GAIN}", list(difference.clip(0, 255).astype(images.dtype))),
    ]
    _write_sheet(rows, _RECONSTRUCTION, path)


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


def channel_histograms(dataset: Shards, levels: Levels, path: Path) -> None:
    """Write, as one PNG, how often each number occurs in each channel of arrays, of a sample of the images, and the
    range that a network sees."""
    rows = np.unique(np.linspace(0, dataset.num_samples - 1, min(_SAMPLED, dataset.num_samples)).round().astype(int))
    images = dataset.gather(rows).numpy()
    figure = new_figure(11, 2.2 * len(levels.channels))
    axes = figure.subplots(len(levels.channels), 1, squeeze=False)[:, 0]
    for channel, (axis, name) in enumerate(zip(axes, levels.channels, strict=True)):
        axis.hist(images[:, channel].ravel(), bins=200, color="#4878a8", log=True)
        for bound in (levels.low[channel], levels.high[channel]):
            axis.axvline(bound, color="#a86848")
        axis.set(ylabel=name, title=f"{levels.low[channel]:g} to {levels.high[channel]:g}")
    save_figure(figure, path)


def repeated_pictures(every: Shards, sheet: Mapping[str, Any], numbers: Mapping[str, int], path: Path) -> list[Path]:
    """Draw pictures that occur more than once, a row each, the most frequent first. Returns the file, if any.

    sheet: of a data set (`describe_images`). numbers: of each image, in the set.
    """
    path.unlink(missing_ok=True)
    chains = sorted(sheet["groups"], key=len, reverse=True)[:_ROWS]
    rows = [(_named(chain), _pixels(every, [numbers[name] for name in chain[:_COLUMNS]])) for chain in chains]
    if rows:
        _write_sheet(rows, _TILE, path)
    return [path] if rows else []


def strange_images(every: Shards, sheet: Mapping[str, Any], numbers: Mapping[str, int], path: Path) -> list[Path]:
    """Draw the strangest images, in rows of what is strange in them. Arguments and result as of `repeated_pictures`."""
    path.unlink(missing_ok=True)
    by_reason: dict[str, list[int]] = {}
    for image in sheet["strange"]:
        by_reason.setdefault(image["why"], []).append(numbers[image["path"]])
    rows = []
    for why, places in by_reason.items():
        for start in range(0, len(places), _COLUMNS):
            title = f"{why} ({len(places)})" if start == 0 else ""
            rows.append((title, _pixels(every, places[start : start + _COLUMNS])))
    if rows:
        _write_sheet(rows, _TILE, path)
    return [path] if rows else []


def _named(chain: Sequence[str]) -> str:
    return f"{len(chain):,} x {', '.join(chain[:3])}" + (", ..." if len(chain) > 3 else "")


def _pixels(every: Shards, places: Sequence[int]) -> list[NDArray[Any]]:
    return list(every.gather(np.array(places)).numpy())


def _write_sheet(rows: list[tuple[str, list[NDArray[Any]]]], tile: int, path: Path) -> None:
    """Write rows of images [C, H, W], each under its title, as one PNG."""
    gap = 2
    height = sum(tile + gap + (_LINE if title else 0) for title, _ in rows)
    width = max([1, *(len(images) for _, images in rows)]) * (tile + gap)
    sheet = Image.new("RGB", (width, max(height, 1)), "white")
    draw, font = ImageDraw.Draw(sheet), font_of(_LINE - 3)
    top = 0
    for title, images in rows:
        if title:
            draw.text((2, top), title, fill="black", font=font)
            top += _LINE
        for column, image in enumerate(images):
            sheet.paste(_as_rgb(image).resize((tile, tile), Image.Resampling.BICUBIC), (column * (tile + gap), top))
        top += tile + gap
    with atomic_write(path) as file:
        sheet.save(file, format="png")


def _as_rgb(image: NDArray[Any]) -> Image.Image:
    """Convert a crop to an RGB picture; alpha is shown over white, arrays as by `as_pictures`."""
    pixels = as_pictures(torch.from_numpy(image)[None])[0].permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if picture.mode in ("LA", "RGBA"):
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture.convert("RGB")
