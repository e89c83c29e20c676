"""The centre crop at twice the speed: torch's kernels instead of Pillow's, at most 2 of 255 levels off.

Only `resize: fast` comes here, so that nobody else waits for torch to be imported.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg

from image_diffusion.data.centre_crop import halve, scaled_size


def crop_jpeg(data: bytes, resolution: int) -> NDArray[np.uint8]:
    """The bytes of an RGB JPEG -> its crop, uint8 [3, resolution, resolution].

    torchvision decodes to the pixels of Pillow, faster. Raises RuntimeError when the file is damaged.
    """
    x = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    if min(x.shape[1:]) >= 2 * resolution:  # only Pillow halves as the original does
        return crop_pillow(Image.fromarray(x.permute(1, 2, 0).numpy()), resolution)
    return _crop(x, resolution)


def crop_pillow(image: Image.Image, resolution: int) -> NDArray[np.uint8]:
    """A decoded image -> its crop, uint8 [C, resolution, resolution]."""
    pixels = np.array(halve(image, resolution))
    return _crop(torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1), resolution)


def _crop(x: Tensor, resolution: int) -> NDArray[np.uint8]:
    """X: uint8 [C, H, W], channels last in memory, for which the kernel is fastest."""
    width, height = scaled_size(x.shape[2], x.shape[1], resolution)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    x = interpolate(x.unsqueeze(0), size=(height, width), mode="bicubic", antialias=True)[0]
    cropped: NDArray[np.uint8] = x[:, top : top + resolution, left : left + resolution].contiguous().numpy()
    return cropped
