"""Keep the whole image and add bars if its aspect ratio differs from the crop's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size, height_width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class Pad(Config):
    """Scale bicubically, so that the whole image just fits into the crop, and fill the rest with `data.background`, or
    with transparent pixels if the crops have an alpha channel. Nothing is cut off, and a model learns the bars."""

    type: Literal["pad"] = "pad"
    """The whole image, with bars (letterbox)."""
    has_one_scale: ClassVar = True
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "pad", "cuts": False}

    def crops(
        self, image: Image, resolution: int | Size, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the whole image with its bars, [H, W] or [H, W, C] in the image's mode."""
        import numpy as np
        from PIL import Image as Pillow  # imported here: planning needs no Pillow
        from PIL import ImageColor

        width, height = self.scaled_size(*image.size, resolution)
        opacity = "00" if image.mode.endswith("A") else ""
        colour = ImageColor.getcolor(f"#{bytes(background).hex()}{opacity}", image.mode)
        rows, columns = height_width(resolution)
        whole = Pillow.new(image.mode, (columns, rows), colour)
        scaled = image.resize((width, height), Pillow.Resampling.BICUBIC)
        whole.paste(scaled, (round((columns - width) / 2), round((rows - height) / 2)))
        return [np.asarray(whole)]

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        """Return the size (width, height) that an image has before bars are added, one pixel at least."""
        rows, columns = height_width(resolution)
        if width * rows >= height * columns:
            return columns, max(1, round(height / width * columns))
        return max(1, round(width / height * rows)), rows
