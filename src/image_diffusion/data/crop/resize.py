"""torchvision's Resize and CenterCrop, which most implementations outside ADM's family use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size, height_width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class ResizeCrop(Config):
    """Scale with antialiasing, so that the shorter side equals the resolution, and cut out the centre. The bytes are
    those of torchvision's `Resize(resolution)` and `CenterCrop(resolution)` on a Pillow image, as in
    recurrent-interface-network-pytorch and DALLE-pytorch."""

    type: Literal["resize"] = "resize"
    """torchvision's Resize and CenterCrop."""
    has_one_scale: ClassVar = True
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """Resampling filter, named as in torchvision's Resize. OpenAI's DALL-E uses lanczos."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "resize-centre-crop", "interpolation": self.interpolation}

    def crops(
        self, image: Image, resolution: int | Size, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the centre of an image, [H, W] or [H, W, C] in the image's mode."""
        import numpy as np
        from PIL.Image import Resampling  # imported here: planning needs no Pillow

        width, height = self.scaled_size(*image.size, resolution)
        if image.size != (width, height):
            image = image.resize((width, height), Resampling[self.interpolation.upper()])
        rows, columns = height_width(resolution)
        left, top = round((width - columns) / 2), round((height - rows) / 2)
        return [np.asarray(image.crop((left, top, left + columns, top + rows)))]

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        """Return the size (width, height) that an image has before anything is cut off."""
        rows, columns = height_width(resolution)
        if width * rows <= height * columns:
            return columns, int(columns * height / width)
        return int(rows * width / height), rows
