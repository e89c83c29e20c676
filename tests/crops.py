"""Our crop beside the formula that guided-diffusion states, for the tests of both."""

from __future__ import annotations

import numpy as np
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.images import crop_image, quiet_pillow


def original(image: Image.Image, size: int) -> np.ndarray:
    """The formula as guided-diffusion states it: one resize of the whole image, then the centre cut out."""
    image = image.convert("RGB")
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    new_size = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(new_size, resample=Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(data: bytes, resolution: int, resize: str = "exact") -> np.ndarray:
    """Our crop as [H, W, C]."""
    config = DataConfig(name="x", source={"type": "digits"}, resolution=resolution, resize=resize)  # type: ignore[arg-type]
    with quiet_pillow():
        return crop_image(data, config).pixels.transpose(1, 2, 0)
