"""Several parts of every image, of random place, size and shape: torchvision's RandomResizedCrop, drawn once."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size, height_width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_ATTEMPTS = 10

Range = tuple[float, float]


class RandomResizedCrop(Config):
    """Cut out a part of random area, shape and place, and scale it with antialiasing (Szegedy et al. 2015, in
    the form of torchvision's RandomResizedCrop). The parts of an image follow from `seed` and its bytes, so they are
    the same whenever and wherever it is cropped; of each image there are `num_crops`, all in one split."""

    type: Literal["random_resized"] = "random_resized"
    """Several random parts of every image, stored."""
    has_one_scale: ClassVar = False
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""
    num_crops: int = Field(4, ge=1, le=64)
    """Parts of each image: the data set has num_crops times as many examples as images."""
    scale: Range = (0.08, 1.0)
    """Smallest and largest area of a part, as a share of the image's."""
    ratio: Range = (3 / 4, 4 / 3)
    """Narrowest and widest part, width over height, before it takes the shape of the crop."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """The filter, by torchvision's name."""
    seed: int = Field(0, ge=0)
    """Seed of the parts."""

    @field_validator("scale", "ratio")
    @classmethod
    def _is_a_range(cls, value: Range) -> Range:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"{list(value)} is not a range. Use two numbers above 0, the smaller one first.")
        return value

    @field_validator("scale")
    @classmethod
    def _is_a_share(cls, value: Range) -> Range:
        if value[1] > 1:
            raise ValueError(f"scale ends at {value[1]}, but no part is larger than the image. Give at most 1.")
        return value

    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""
        return {"method": "random-resized-crop", **self.model_dump(mode="json", exclude={"type"})}

    def crops(
        self, image: Image, resolution: int | Size, background: tuple[int, int, int], data: bytes
    ) -> list[NDArray[np.uint8]]:
        """Return parts of an image, each [H, W] or [H, W, C] of its own mode. data: its file, which they are drawn
        from."""
        import numpy as np  # neither is for those who only plan
        from PIL.Image import Resampling

        draw = np.random.default_rng([self.seed, *hashlib.sha256(data).digest()])
        filter_ = Resampling[self.interpolation.upper()]
        rows, columns = height_width(resolution)
        parts = (image.crop(self.box(*image.size, draw)) for _ in range(self.num_crops))
        return [np.asarray(part.resize((columns, rows), filter_)) for part in parts]

    def box(self, width: int, height: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
        """Return the left, top, right and bottom of a part, in pixels.

        As RandomResizedCrop.get_params: the area is uniform, the logarithm of the shape too; where ten of them do not
        fit into the image, it is the centre, as near to the whole as `ratio` allows.
        """
        low, high = self.ratio
        for _ in range(_ATTEMPTS):
            area = width * height * draw.uniform(*self.scale)
            shape = math.exp(draw.uniform(math.log(low), math.log(high)))
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(draw.integers(width - w + 1)), int(draw.integers(height - h + 1))
                return left, top, left + w, top + h
        w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        """Return the size (width, height) that a part is scaled to."""
        rows, columns = height_width(resolution)
        return columns, rows
