"""ADM's centre crop, which DiT, EDM2 and most others use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class AdmCrop(Config):
    """Halve with a box filter while the shorter side is at least twice the resolution, scale bicubically, cut out the
    centre (Dhariwal and Nichol 2021, guided-diffusion)."""

    type: Literal["adm"] = "adm"
    """The centre crop of ADM."""
    has_one_scale: ClassVar = True
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "adm-centre-crop"}

    def crops(
        self, image: Image, resolution: int | Size, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the centre of an image, [H, W] or [H, W, C] in the image's mode."""
        from image_diffusion.data.crop.centre_crop import centre_crop  # imported here: planning needs no Pillow

        return [centre_crop(image, resolution)]

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        """Return the size (width, height) that an image has before anything is cut off."""
        from image_diffusion.data.crop.centre_crop import scaled_size

        return scaled_size(width, height, resolution)
