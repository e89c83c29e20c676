"""Pictures to sample from (`sample.given`, `sample.start`), cropped as the images of the data set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import load
from image_diffusion.core.resolution import size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import WHITE, DataConfig
from image_diffusion.data.sources.folder import Folder
from image_diffusion.samplers.from_images import FromImages, Inpainting, Start
from image_diffusion.systems.pairs.images import ImageCropper

_GREY = 128
_KNOWN = 128  # lowest grey level of a known pixel in a mask


@dataclass(frozen=True)
class Pictures:
    """Pictures to sample from: seed s takes row s modulo the number of rows.

    start: uint8 [M, C, H, W], with `strength`. known: uint8 [N, C, H, W], grey where unknown, with `resamplings` and
    `mask`, bool [N, 1, H, W] or [1, 1, H, W], true where known. factor: number of pixels along an edge per element of
    x.
    """

    start: Tensor | None
    strength: float
    known: Tensor | None
    mask: Tensor | None
    resamplings: int
    factor: int

    def of_seeds(self, seeds: Tensor, encode: Callable[[Tensor], Tensor]) -> FromImages:
        """Return the images that samples of some seeds, int64 [B], are made from. encode: uint8 images [B, C, H, W] ->
        x0."""
        start, known, mask = (_rows(pixels, seeds) for pixels in (self.start, self.known, self.mask))
        x0 = None if known is None else encode(known)
        where = None if x0 is None or mask is None else least_known(mask, self.factor).to(x0.device)
        return FromImages(None if start is None else encode(start), self.strength, x0, where, self.resamplings)

    def pasted(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Return the images of some seeds, uint8 [B, C, H, W], with the known pixels copied from the pictures."""
        known, mask = _rows(self.known, seeds), _rows(self.mask, seeds)
        return images if known is None or mask is None else torch.where(mask, known, images)

    @property
    def source(self) -> dict[str, str]:
        """Return the sha256 of the pixels of each kind, for samples.json."""
        kinds = {"start": self.start, "known": self.known, "mask": self.mask}
        return {
            name: hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
            for name, pixels in kinds.items()
            if pixels is not None
        }


def listed(inpainting: Inpainting | None, start: Start | None) -> list[Path]:
    """Return all files that the two sections name. Raises ValueError if there are none."""
    paths = {"sample.start.images": start.images} if start is not None else {}
    if inpainting is not None:
        paths |= {"sample.given.images": inpainting.images, "sample.given.mask": inpainting.mask}
    return [path for key, named in paths.items() for path in _files(key, named)]


def read_pictures(
    inpainting: Inpainting | None, start: Start | None, crop: Path | None, spec: DataSpec
) -> Pictures | None:
    """Return the pictures of `sample.given` and `sample.start`; None if both are unset.

    crop: crop.yaml of the data set. spec: of the data that the network was trained on, pixels or latents. Raises
    ValueError for pictures that cannot be read or that do not fit, and for a mask without known or without unknown
    pixels.
    """
    if inpainting is None and start is None:
        return None
    if crop is None:
        raise ValueError(
            "sample.given and sample.start read images, which are cropped as those of the data set. Name how: --crop "
            "results/datasets/NAME/config/crop.yaml."
        )
    data = load(DataConfig, crop)
    check_crop(data)
    factor, key = data.size[0] // spec.size[0], "sample.start.images"
    if data.size != (factor * spec.size[0], factor * spec.size[1]):
        raise ValueError(
            f"{crop} makes crops of {size_text(data.resolution)}, but the network was trained on "
            f"{size_text(spec.resolution)}. Name the crop.yaml of its data set."
        )
    known, mask = (None, None) if inpainting is None else _known_part(inpainting, data, factor)
    return Pictures(
        start=None if start is None else ImageCropper(data, {}).read(_files(key, start.images), key)[0],
        strength=1.0 if start is None else start.strength,
        known=known,
        mask=mask,
        resamplings=1 if inpainting is None else inpainting.resamplings,
        factor=factor,
    )


def check_crop(data: DataConfig) -> None:
    """Raise ValueError for a crop type that makes several crops of an image, or a random one."""
    if data.crop.type in ("multi", "random_resized"):
        raise ValueError(
            f"sample.given and sample.start need the one crop that an image gives, but data.crop.type is "
            f"{data.crop.type}. Leave them out, or train on crops of another type."
        )


def least_known(mask: Tensor, factor: int) -> Tensor:
    """Return the mask of known latents, bool [N, 1, h, w], for a mask of pixels [N, 1, H, W]: a latent is known if all
    of its `factor` by `factor` pixels are."""
    return F.avg_pool2d(mask.float(), factor) == 1


def _rows(pixels: Tensor | None, seeds: Tensor) -> Tensor | None:
    return None if pixels is None else pixels[seeds % len(pixels)]


def _known_part(inpainting: Inpainting, data: DataConfig, factor: int) -> tuple[Tensor, Tensor]:
    files, masks = _files("sample.given.images", inpainting.images), _files("sample.given.mask", inpainting.mask)
    if len(masks) > 1 and [path.stem for path in masks] != [path.stem for path in files]:
        raise ValueError(
            f"sample.given.mask holds {len(masks):,} masks that are not named like the {len(files):,} images of "
            f"{inpainting.images}. Give one mask for all images, or one of the same name for each."
        )
    images, sizes = ImageCropper(data, {}).read(files, "sample.given.images")
    # The bars of `data.crop.type: pad` are white, and so known, whatever their colour in the data set.
    grey = data.model_copy(update={"channels": 1, "background": WHITE})
    levels, mask_sizes = ImageCropper(grey, {}).read(masks, "sample.given.mask")
    for i, size in enumerate(sizes):
        j = i % len(masks)
        if size != mask_sizes[j]:
            raise ValueError(
                f"sample.given.mask: {masks[j]} has {size_text(mask_sizes[j])} pixels, but {files[i]} has "
                f"{size_text(size)}. Give a mask the size of its image."
            )
    mask = levels >= _KNOWN
    is_full, is_empty = mask.flatten(1).all(1), ~least_known(mask, factor).flatten(1).any(1)
    for path, full, empty in zip(masks, is_full.tolist(), is_empty.tolist(), strict=True):
        if full or empty:
            raise ValueError(
                f"sample.given.mask: {path} leaves nothing {'to fill in' if full else 'known'} of its image, once "
                f"cropped. White is known, and black is filled in."
            )
    return torch.where(mask, images, torch.tensor(_GREY, dtype=torch.uint8)), mask


def _files(key: str, named: str) -> list[Path]:
    """Return the files of a folder in the order of their names, or a single file."""
    if Path(named).is_file():
        return [Path(named)]
    try:
        listing = Folder(path=named, classes="none").listing()
    except ValueError as error:
        raise ValueError(f"{key}: {str(error).removeprefix('data.source.path: ')}") from None
    for name, reason in listing.rejected:
        raise ValueError(f"{key}: {named}/{name} cannot be read: {reason}. Remove it, or replace it.")
    return [Path(named, str(item.address[0])) for item in listing.items]
