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

    The bytes of the original formula, with less work: Pillow scales rows first and columns second, so columns
    that the crop throws away are cut off between the two passes.
    """
    image = halve(image, resolution)
    width, height = scaled_size(*image.size, resolution)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    if image.mode in ("LA", "RGBA"):  # Pillow multiplies by alpha around a whole resize: two passes would round twice
        image = image.resize((width, height), resample=Resampling.BICUBIC)
        return image.crop((left, top, left + resolution, top + resolution))
    if width != image.width:
        image = image.resize((width, image.height), resample=Resampling.BICUBIC)
    if width != resolution:
        image = image.crop((left, 0, left + resolution, image.height))
    if height != image.height:
        image = image.resize((resolution, height), resample=Resampling.BICUBIC)
    if height != resolution:
        image = image.crop((0, top, resolution, top + resolution))
    return image
