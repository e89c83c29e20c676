"""Keep the whole image, with bars where it is not a square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from image_diffusion.core.config.base import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class Pad(Config):
    """Scale bicubically, so that the longer side equals the resolution, and fill up with `data.background`, or with
    nothing where the crops have an alpha channel. Nothing is cut off, and a model learns the bars."""

    type: Literal["pad"] = "pad"
    """The whole image, with bars (letterbox)."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "pad", "cuts": False}

    def squares(
        self, image: Image, resolution: int, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the whole of an image, [H, W] or [H, W, C] of its own mode."""
        import numpy as np
        from PIL import Image as Pillow  # Pillow is not for those who only plan
        from PIL import ImageColor

        width, height = self.scaled_size(*image.size, resolution)
        opacity = "00" if image.mode.endswith("A") else ""
        colour = ImageColor.getcolor(f"#{bytes(background).hex()}{opacity}", image.mode)
        square = Pillow.new(image.mode, (resolution, resolution), colour)
        scaled = image.resize((width, height), Pillow.Resampling.BICUBIC)
        square.paste(scaled, (round((resolution - width) / 2), round((resolution - height) / 2)))
        return [np.asarray(square)]

    def scaled_size(self, width: int, height: int, resolution: int) -> tuple[int, int]:
        """Return the size (width, height) that an image has before bars are added, one pixel at least."""
        if width >= height:
            return resolution, max(1, round(height / width * resolution))
        return max(1, round(width / height * resolution)), resolution
