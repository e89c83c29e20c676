"""Files of images that a network is conditioned on, named by their paths or held in a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.image import quiet_pillow
from image_diffusion.data.sources.base import read_image
from image_diffusion.systems.pairs.images import ImageCropper


def read_files(files: Sequence[str | Path | bytes], key: str, crop: ImageCropper, keeps_size: bool = False) -> Tensor:
    """Return the images of files, or of the contents of some, cropped, uint8 [P, C, H, W]. key: that names them.
    keeps_size: refuse files of another size in place of cropping them. Raises ValueError for what cannot be read."""
    images = dict[str | Path | bytes, NDArray[np.uint8]]()
    height, width = crop.shape[1:]
    with quiet_pillow():
        for row, file in enumerate(files):
            if file in images:
                continue
            name = f"image of row {row}" if isinstance(file, bytes) else str(file)
            try:
                crops, size = crop(file if isinstance(file, bytes) else read_image(Path(file)))
            except (BadImage, Undecided, OSError) as error:
                raise ValueError(f"{key}: {name} cannot be read: {error}. Remove it, or replace it.") from None
            if keeps_size and size != (width, height):
                raise ValueError(
                    f"{key}: {name} has {size[0]} x {size[1]} pixels, but the network takes images of {width} x "
                    f"{height}. Give one of that size."
                )
            images[file] = crops[0]
    return torch.from_numpy(np.stack([images[file] for file in files]))
