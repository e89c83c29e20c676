"""The ADM centre crop: any image -> a square of a stated resolution.

Dhariwal and Nichol 2021 (guided-diffusion, also DiT and EDM2): halve with a box filter while the shorter side is at
least twice the target, scale bicubically so that the shorter side equals the target, cut out the centre.
"""

from __future__ import annotations

from PIL import Image

Resampling = Image.Resampling


def scaled_size(width: int, height: int, resolution: int) -> tuple[int, int]:
    """The size (width, height) an image is scaled to before its centre is cut out, halvings included."""
    while min(width, height) >= 2 * resolution:
        width, height = width // 2, height // 2
    scale = resolution / min(width, height)
    return round(width * scale), round(height * scale)


def halve(image: Image.Image, resolution: int) -> Image.Image:
    """Halve the image with a box filter until its shorter side is less than twice the resolution."""
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), resample=Resampling.BOX)
    return image


def centre_crop(image: Image.Image, resolution: int) -> Image.Image:
    """The centre of the image as a square of `resolution` pixels, of the image's own mode.

    The bytes of the original formula, with less work on wide images: Pillow scales these along the rows first, so the
    columns that the crop throws away are cut off before they are scaled along the columns. (Pillow 13 scales tall
    images the other way round, and multiplies by alpha around a whole resize: both are left to it.)
    """
    image = halve(image, resolution)
    width, height = scaled_size(*image.size, resolution)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    if width > resolution and image.mode not in ("LA", "RGBA"):
        image = image.resize((width, image.height), resample=Resampling.BICUBIC)
        image = image.crop((left, 0, left + resolution, image.height))
        return image.resize((resolution, resolution), resample=Resampling.BICUBIC)
    image = image.resize((width, height), resample=Resampling.BICUBIC)
    return image.crop((left, top, left + resolution, top + resolution))
