"""Colour profiles (ICC) that image files carry: which of them are not sRGB, and the conversion to it."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

_MODES = {"L": "L", "LA": "L", "RGB": "RGB", "RGBA": "RGB", "P": "RGB", "PA": "RGB", "CMYK": "CMYK"}
"""Mode of an image in its profile, by the mode of the image."""
_TOLERANCE = 3
"""Maximum difference from sRGB of profiles that are named sRGB, in levels of 255."""


def is_other(image: Image.Image, profile: bytes) -> bool:
    """True if the profile of an image, empty where it has none, is one of its channels and not sRGB."""
    return bool(profile) and image.mode in _MODES and _conversion(profile, _MODES[image.mode]) is not None


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image of which `is_other` holds to sRGB: RGB, or RGBA where it is transparent."""
    conversion = _conversion(profile, _MODES[image.mode])
    assert conversion is not None
    opacity = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    converted = conversion.apply(image.convert(_MODES[image.mode]))
    if opacity is not None:
        converted.putalpha(opacity)
    return converted


@lru_cache(maxsize=16)
def _conversion(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion of images of a mode; None where it would change next to nothing, or the profile is damaged
    or of other channels."""
    try:
        conversion = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    bands = len(Image.new(mode, (1, 1)).getbands())
    probe = np.stack(np.meshgrid(*[levels] * bands), -1).reshape(1, -1, bands)
    image = Image.fromarray(probe[..., 0] if bands == 1 else probe, mode)
    change = np.asarray(conversion.apply(image)).astype(int) - np.asarray(image.convert("RGB"))
    return conversion if np.abs(change).max() > _TOLERANCE else None
