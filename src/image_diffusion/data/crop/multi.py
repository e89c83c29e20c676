"""Cut a wide or tall image into several crops along its longer side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from image_diffusion.core.resolution import Size, height_width
from image_diffusion.data.crop.adm import AdmCrop

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_NEARLY = 0.1
"""Share of a side that is cut off instead of adding one more crop, which would nearly repeat the one before it."""


class MultiCrop(AdmCrop):
    """Scale as ADM's crop does, then cut out crops that are evenly spaced along the longer side, from one end to the
    other. Square crops: one from a square image, two from an image of 3 : 2, three from a panorama of 3 : 1. All crops
    of an image are in one split."""

    type: Literal["multi"] = "multi"  # type: ignore[assignment]
    """Several crops along the longer side of an image."""
    max_crops: int = Field(4, ge=2, le=64)
    """Maximum number of crops per image; in longer images, the parts between the crops are lost."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "multi-crop", "max_crops": self.max_crops, "cuts": False}

    def crops(
        self, image: Image, resolution: int | Size, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the crops of an image from left to right or top to bottom, each [H, W] or [H, W, C] in the image's
        mode."""
        import numpy as np  # imported here: planning needs neither
        from PIL.Image import Resampling

        from image_diffusion.data.crop.centre_crop import halve

        width, height = self.scaled_size(*image.size, resolution)
        pixels = np.asarray(halve(image, resolution).resize((width, height), Resampling.BICUBIC))
        rows, columns = height_width(resolution)
        is_tall = height - rows > width - columns
        length, side = (height, rows) if is_tall else (width, columns)
        count = max(1, min(self.max_crops, math.ceil(length / side - _NEARLY)))
        spare = length - side
        starts = [round(spare * number / (count - 1)) for number in range(count)] if count > 1 else [spare // 2]
        if is_tall:
            return [pixels[start : start + rows, :columns] for start in starts]
        return [pixels[:rows, start : start + columns] for start in starts]
