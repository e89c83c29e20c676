"""Super-resolution: a network that enlarges small images (Nichol & Dhariwal 2021, section 6; Saharia et al. 2021).

In training the small images are the crops themselves, averaged over areas. Sampling reads them from a samples.npz, so
that one experiment can enlarge the samples of another (a cascade, Ho et al. 2021), or averages held-out crops, so that
the result can be compared with the originals.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.npz import read_arrays
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.distances.moments import block_of_each
from image_diffusion.metrics.features.base import AT_ONCE, ImageSet
from image_diffusion.metrics.images.reconstruction import psnr
from image_diffusion.metrics.samples import Samples

_SHOWN = 10


@dataclass(frozen=True)
class SmallImages:
    """Input images of a super-resolution network.

    images: float32 [N, C, side, side] in [-1, 1], one for each seed. labels: int64 [N], if known. source: their
    description for samples.json; it has "split" if they are downsampled crops, so that the result can be compared with
    the originals.
    """

    images: Tensor
    labels: Tensor | None
    source: dict[str, Any]


def check_wanted(source: str | SamplesOf | None, side: int | None) -> None:
    """Raise ValueError unless small images are set exactly for a network that enlarges.

    source: sample.small_images. side: of the images that the network enlarges; None: it enlarges none.
    """
    if side is None and source is not None:
        raise ValueError(
            "sample.small_images is set, but the network makes images from noise alone. Leave it out, or set "
            "system.network.low_resolution."
        )
    if side is not None and source is None:
        raise ValueError(
            f"The network enlarges images of {side} x {side}, but sample.small_images names none. Give "
            f"{{experiment: NAME}} of one that makes such images, a samples.npz with them, or validation."
        )


def small_images(
    source: str | SamplesOf | None, file: Path | None, side: int | None, spec: DataSpec, seeds: Tensor
) -> SmallImages | None:
    """Return the small images of some seeds, int64 [N]; None for a network that makes images from noise alone.

    source: sample.small_images. file: the file or folder of them from the command line. side: of the images that the
    network enlarges; None: it enlarges none. spec: of the large images. Raises ValueError for small images that are
    missing, unused or do not fit.
    """
    check_wanted(source, side)
    if side is None:
        return None
    if file is None and (source == "validation" or isinstance(source, SamplesOf)):
        what = f"the samples.npz of {source.experiment}" if isinstance(source, SamplesOf) else "the folder of the crops"
        raise ValueError(f"sample.small_images needs {what}. Name it: --small-images PATH.")
    path = file or Path(str(source))
    if source == "validation":
        return _small_crops(path, side, spec, seeds)
    images, labels = small_samples(path, side, spec, seeds)
    return SmallImages(images, labels, {"side": side, "sha256": sha256_file(path)})


def _small_crops(folder: Path, side: int, spec: DataSpec, seeds: Tensor) -> SmallImages:
    held_out = open_shards(folder, "validation")
    if held_out.shape != (spec.channels, *spec.size):
        raise ValueError(
            f"The crops in {folder} have shape {list(held_out.shape)}, but the network makes images of "
            f"{[spec.channels, *spec.size]}. Name the crops it was trained on."
        )
    images, labels = small_held_out(held_out, side, seeds)
    return SmallImages(images, labels, {"side": side, "split": "validation", "data": held_out.digest})


def shrink(x: Tensor, side: int) -> Tensor:
    """Reduce [B, C, H, W] -> [B, C, side, side], each pixel the mean of the area that it replaces."""
    return F.interpolate(x, (side, side), mode="area")


def small_held_out(images: Shards, side: int, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return downsampled crops for seeds int64 [N]: float32 [N, C, side, side] in [-1, 1], and their labels, int64 [N].
    Seed s uses crop s modulo their number. Raises ValueError for a split without crops.
    """
    if images.num_samples == 0:
        raise ValueError("sample.small_images is validation, but no images are held out. Set data.validation_fraction.")
    rows = (seeds % images.num_samples).numpy()
    labels = torch.from_numpy(images.labels[rows]) if images.num_classes else None
    return shrink(from_uint8(images.gather(rows)), side), labels


def small_samples(path: Path, side: int, spec: DataSpec, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
    """Read small images from a file, for seeds int64 [N]: float32 [N, C, side, side] in [-1, 1], and their labels.

    path: a samples.npz, arr_0 uint8 [M, H, W, C] and, with classes, arr_1 int64 [M]; seed s has row s modulo M. Raises
    ValueError when it cannot be read, its images are of another size, or a label is not a class of the network.
    """
    try:
        arrays = read_arrays(path)
        images = torch.from_numpy(arrays["arr_0"].copy())
        labels = torch.from_numpy(arrays["arr_1"].copy()) if "arr_1" in arrays else None
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"sample.small_images: {path} is not a samples.npz: {error}") from None
    if tuple(images.shape[1:]) != (side, side, spec.channels) or images.dtype != torch.uint8 or not len(images):
        raise ValueError(
            f"sample.small_images: {path} holds {images.dtype} images of {tuple(images.shape)}, but the network "
            f"enlarges uint8 images of (N, {side}, {side}, {spec.channels}). Sample an experiment of that resolution."
        )
    if labels is not None and spec.num_classes and not 0 <= int(labels.min()) <= int(labels.max()) < spec.num_classes:
        raise ValueError(
            f"sample.small_images: {path} has labels up to {int(labels.max())}, but the network has "
            f"{spec.num_classes} classes. Sample an experiment of the same data."
        )
    rows = seeds % len(images)
    return from_uint8(images[rows].permute(0, 3, 1, 2)), None if labels is None else labels[rows]


def evaluate_enlarging(samples: Samples, originals: ImageSet, report: Path | None = None) -> dict[str, Any]:
    """Compare enlarged images with their originals, and with a bicubic enlargement.

    Returns entries of metrics.json by name, for samples of `sample.small_images: validation`; nothing for others.

    Where seeds run through the held-out images k times, an image has k samples. "psnr": of each of them, in dB, mean
    over the images; "psnr_mean": of the mean of an image's samples, where k is above 1, an estimate of the posterior
    mean, which no sample can match in PSNR; "psnr_bicubic": of the bicubic enlargement of the small image; "psnr_gain":
    psnr_mean, or psnr, minus that of bicubic, image by image. report: a folder for enlarged.png, from top to bottom:
    small image, bicubic, sample, mean of the samples if k is above 1, original.

    Raises ValueError when the held-out images are no longer those that were enlarged.
    """
    enlarged = samples.protocol.get("enlarged", {})
    if enlarged.get("split") != "validation":
        return {}
    if enlarged["data"] != originals.digest:
        raise ValueError("The data set has changed since its images were enlarged. Run sample again.")
    first_seed = int(samples.protocol["settings"]["first_seed"])
    row_of_each = (first_seed + np.arange(samples.num_samples)) % originals.num_samples
    rows = np.unique(row_of_each)
    several = len(rows) < samples.num_samples
    parts: dict[str, list[Tensor]] = {}
    shown: Tensor | None = None
    for start in range(0, len(rows), AT_ONCE):
        chosen = rows[start : start + AT_ONCE]
        original = originals.gather(chosen)
        small = shrink(from_uint8(original), int(enlarged["side"]))
        # antialias changes nothing in an enlargement but the kernel, to that of Pillow and Matlab (a = -0.5)
        bicubic = to_uint8(F.interpolate(small, tuple(original.shape[2:]), mode="bicubic", antialias=True))
        place = np.searchsorted(chosen, row_of_each.clip(chosen[0], chosen[-1]))
        numbers = np.flatnonzero(chosen[place] == row_of_each)
        image = torch.from_numpy(place[numbers])
        drawn = samples.gather(numbers)
        counts = torch.bincount(image, minlength=len(chosen)).to(torch.float64)
        sums = torch.zeros(len(chosen), dtype=torch.float64).index_add_(0, image, psnr(original[image], drawn))
        total = torch.zeros(original.shape, dtype=torch.float64).index_add_(0, image, drawn.to(torch.float64))
        mean = (total / counts[:, None, None, None]).round().to(torch.uint8)
        values = {"psnr": sums / counts, "psnr_bicubic": psnr(original, bicubic)}
        if several:
            values["psnr_mean"] = psnr(original, mean)
        values["psnr_gain"] = values.get("psnr_mean", values["psnr"]) - values["psnr_bicubic"]
        for name, value in values.items():
            parts.setdefault(name, []).append(value)
        if shown is None:
            nearest = to_uint8(F.interpolate(small, tuple(original.shape[2:]), mode="nearest"))
            first = drawn[torch.tensor([int((image == i).nonzero()[0]) for i in range(min(_SHOWN, len(chosen)))])]
            columns = [nearest, bicubic, first, *([mean] if several else []), original]
            shown = torch.cat([column[:_SHOWN] for column in columns])
    if report is not None and shown is not None:
        save_picture(image_grid(shown, min(_SHOWN, len(rows))), report / "enlarged.png")
    block = block_of_each(len(rows))
    return {name: mean_estimate(torch.cat(values), block).as_dict() for name, values in parts.items()}
