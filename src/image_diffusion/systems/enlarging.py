"""Super-resolution: a network that enlarges small images (Nichol & Dhariwal 2021, section 6; Saharia et al. 2021).

In training the small images are the crops themselves, averaged over areas. Sampling reads them from a samples.npz, so
that one experiment can enlarge what another one makes.
"""

from __future__ import annotations

import zipfile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.codec import from_uint8
from image_diffusion.core.types import DataSpec


def shrink(x: Tensor, side: int) -> Tensor:
    """[B, C, H, W] -> [B, C, side, side], each pixel the mean of the area it stands for."""
    return F.interpolate(x, (side, side), mode="area")


def small_images(
    path: str | None, side: int | None, spec: DataSpec, seeds: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The small images of some seeds, int64 [N]: float32 [N, C, side, side] in [-1, 1], and their labels, int64 [N].

    side: of the images that the network enlarges; none for a network that makes images from noise alone, which takes
    no path. path: a samples.npz, arr_0 uint8 [M, H, W, C] and, with classes, arr_1 int64 [M]; seed s has row s modulo
    M. Raises ValueError when it is missing or not wanted, its images are of another size, or a label is no class.
    """
    if side is None:
        if path is not None:
            raise ValueError(
                f"sample.small_images is {path}, but the network makes images from noise alone. Leave it out, or "
                f"sample an experiment with network.low_resolution."
            )
        return None, None
    if path is None:
        raise ValueError(
            f"The network enlarges images of {side} x {side}, but sample.small_images names none. Give a samples.npz "
            f"with images of that size, such as another experiment's."
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images = torch.from_numpy(arrays["arr_0"])
            labels = torch.from_numpy(arrays["arr_1"]) if "arr_1" in arrays else None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
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
