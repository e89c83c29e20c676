"""The centre crop at twice the speed: torch's kernels instead of Pillow's, at most 2 of 255 levels off.

Only `resize: fast` comes here, so that nobody else waits for torch to be imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg

from image_diffusion.data.centre_crop import halve, scaled_size


def crop_jpeg(data: bytes, resolution: int) -> NDArray[np.uint8]:
    """The bytes of a grey or RGB JPEG -> its crop, uint8 [3, resolution, resolution].

    torchvision decodes to the pixels of Pillow, faster. Raises RuntimeError when the file is damaged.
    """
    x = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB).permute(1, 2, 0)
    while min(height := x.shape[0], width := x.shape[1]) >= 2 * resolution:
        if height % 2 or width % 2:  # three pixels become one somewhere: only Pillow does it as the original
            return crop_pillow(Image.fromarray(x.numpy()), resolution)
        x = _resize(x, width // 2, height // 2, mode="bilinear")  # the mean of each 2 x 2, as a box filter gives
    return _crop(x, resolution)


def crop_pillow(image: Image.Image, resolution: int) -> NDArray[np.uint8]:
    """A decoded image -> its crop, uint8 [C, resolution, resolution]."""
    pixels = np.array(halve(image, resolution))
    return _crop(torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]), resolution)


def _crop(x: Tensor, resolution: int) -> NDArray[np.uint8]:
    """X: uint8 [H, W, C], its shorter side less than twice the resolution -> uint8 [C, resolution, resolution]."""
    width, height = scaled_size(x.shape[1], x.shape[0], resolution)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    x = _resize(x, width, height, mode="bicubic", antialias=True)
    x = x[top : top + resolution, left : left + resolution].permute(2, 0, 1)
    cropped: NDArray[np.uint8] = x.contiguous().numpy()
    return cropped


def _resize(x: Tensor, width: int, height: int, **how: Any) -> Tensor:
    """X: uint8 [H, W, C] -> [height, width, C]. Channels stay last in memory: for that the kernels are fastest."""
    return interpolate(x.unsqueeze(0).permute(0, 3, 1, 2), size=(height, width), **how)[0].permute(1, 2, 0)
