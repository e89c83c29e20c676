"""torchvision's Resize and CenterCrop, which most implementations outside ADM's family use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from image_diffusion.core.config.base import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class ResizeCrop(Config):
    """Scale with antialiasing, so that the shorter side equals the resolution, and cut out the centre: the bytes of
    `Resize(resolution)` and `CenterCrop(resolution)` of torchvision.transforms on a Pillow image, as
    recurrent-interface-network-pytorch and DALLE-pytorch use them."""

    type: Literal["resize"] = "resize"
    """torchvision's Resize and CenterCrop."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """The filter, by Resize's name. OpenAI's DALL-E scales by lanczos."""

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "resize-centre-crop", "interpolation": self.interpolation}

    def squares(
        self, image: Image, resolution: int, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return the centre of an image, [H, W] or [H, W, C] of its own mode."""
        import numpy as np
        from PIL.Image import Resampling  # Pillow is not for those who only plan

        width, height = self.scaled_size(*image.size, resolution)
        if image.size != (width, height):
            image = image.resize((width, height), Resampling[self.interpolation.upper()])
        left, top = round((width - resolution) / 2), round((height - resolution) / 2)
        return [np.asarray(image.crop((left, top, left + resolution, top + resolution)))]

    def scaled_size(self, width: int, height: int, resolution: int) -> tuple[int, int]:
        """Return the size (width, height) that an image has before anything is cut off."""
        if width <= height:
            return resolution, int(resolution * height / width)
        return int(resolution * width / height), resolution
