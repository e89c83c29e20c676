"""Super-resolution: a network that enlarges small images (Nichol & Dhariwal 2021, section 6; Saharia et al. 2021).

In training the small images are the crops themselves, averaged over areas. Sampling reads them from a samples.npz, so
that one experiment can enlarge what another one makes (a cascade, Ho et al. 2021), or averages held-out crops, so that
what comes out can be compared with what went in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.codec import from_uint8
from image_diffusion.core.arrays import read_arrays
from image_diffusion.core.files import sha256_file
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards import Shards, open_shards


@dataclass(frozen=True)
class SmallImages:
    """What a super-resolution network enlarges.

    images: float32 [N, C, side, side] in [-1, 1], one for each seed. labels: int64 [N], where known. source: what
    samples.json tells of them; "split" where they are crops made small, with which the result can be compared.
    """

    images: Tensor
    labels: Tensor | None
    source: dict[str, Any]


def check_wanted(wanted: str | SamplesOf | None, side: int | None) -> None:
    """Raise ValueError where a network that enlarges is given nothing, or one that does not is given small images.

    wanted: sample.small_images. side: of the images that the network enlarges; None: it enlarges none.
    """
    if side is None and wanted is not None:
        raise ValueError(
            "sample.small_images is set, but the network makes images from noise alone. Leave it out, or set "
            "system.network.low_resolution."
        )
    if side is not None and wanted is None:
        raise ValueError(
            f"The network enlarges images of {side} x {side}, but sample.small_images names none. Give "
            f"{{experiment: NAME}} of one that makes such images, a samples.npz with them, or validation."
        )


def small_images(
    wanted: str | SamplesOf | None, given: Path | None, side: int | None, spec: DataSpec, seeds: Tensor
) -> SmallImages | None:
    """The small images of some seeds, int64 [N]; None for a network that makes images from noise alone.

    wanted: sample.small_images. given: the file or folder of them, where the command line names it. side: of the images
    that the network enlarges; None: it enlarges none. spec: of those it makes. Raises ValueError for images that are
    missing, not wanted, or do not fit.
    """
    check_wanted(wanted, side)
    if side is None:
        return None
    if given is None and (wanted == "validation" or isinstance(wanted, SamplesOf)):
        what = f"the samples.npz of {wanted.experiment}" if isinstance(wanted, SamplesOf) else "the folder of the crops"
        raise ValueError(f"sample.small_images needs {what}. Name it: --small-images PATH.")
    path = given or Path(str(wanted))
    if wanted == "validation":
        return _small_crops(path, side, spec, seeds)
    images, labels = small_samples(path, side, spec, seeds)
    return SmallImages(images, labels, {"side": side, "sha256": sha256_file(path)})


def _small_crops(folder: Path, side: int, spec: DataSpec, seeds: Tensor) -> SmallImages:
    held_out = open_shards(folder, "validation")
    if held_out.shape != (spec.channels, spec.resolution, spec.resolution):
        raise ValueError(
            f"The crops in {folder} have shape {list(held_out.shape)}, but the network makes images of "
            f"{[spec.channels, spec.resolution, spec.resolution]}. Name the crops it was trained on."
        )
    images, labels = small_held_out(held_out, side, seeds)
    return SmallImages(images, labels, {"side": side, "split": "validation", "data": held_out.digest})


def shrink(x: Tensor, side: int) -> Tensor:
    """[B, C, H, W] -> [B, C, side, side], each pixel the mean of the area it stands for."""
    return F.interpolate(x, (side, side), mode="area")


def small_held_out(images: Shards, side: int, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
    """Crops made small, for some seeds, int64 [N]: float32 [N, C, side, side] in [-1, 1], and their labels, int64 [N].

    Seed s has crop s modulo their number. Raises ValueError when there are none.
    """
    if images.num_samples == 0:
        raise ValueError(
            "sample.small_images is validation, but the data set holds nothing out. Set data.validation_fraction."
        )
    rows = (seeds % images.num_samples).numpy()
    labels = torch.from_numpy(images.labels[rows]) if images.num_classes else None
    return shrink(from_uint8(images.gather(rows)), side), labels


def small_samples(path: Path, side: int, spec: DataSpec, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
    """Small images in a file, for some seeds, int64 [N]: float32 [N, C, side, side] in [-1, 1], and their labels.

    path: a samples.npz, arr_0 uint8 [M, H, W, C] and, with classes, arr_1 int64 [M]; seed s has row s modulo M. Raises
    ValueError when it cannot be read, its images are of another size, or a label is no class of the network.
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
            f"sample.small_images: {path} has labels up to {int(labels.max())}, but the network knows "
            f"{spec.num_classes} classes. Sample an experiment of the same data."
        )
    rows = seeds % len(images)
    return from_uint8(images[rows].permute(0, 3, 1, 2)), None if labels is None else labels[rows]
