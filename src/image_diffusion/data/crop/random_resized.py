"""Several random parts of every image: torchvision's RandomResizedCrop, drawn once."""

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
    """Cut out parts of random area, aspect ratio and position, and scale them with antialiasing (Szegedy et al. 2015,
    as in torchvision's RandomResizedCrop). `seed` and the bytes of the file decide the parts, so they are reproducible
    on any machine. Each image has `num_crops` parts, all in one split."""

    type: Literal["random_resized"] = "random_resized"
    """Several random parts of every image, drawn once and stored."""
    has_one_scale: ClassVar = False
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""
    num_crops: int = Field(4, ge=1, le=64)
    """Number of parts of each image: the data set has num_crops times as many examples as images."""
    scale: Range = (0.08, 1.0)
    """Smallest and largest area of a part, as a share of the image's area."""
    ratio: Range = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio of a part, width over height, before it is scaled to the shape of the crop."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """Resampling filter, named as in torchvision."""
    seed: int = Field(0, ge=0)
    """Random seed of the parts."""

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
        """Return parts of an image, each [H, W] or [H, W, C] in the image's mode. data: bytes of the file, which seed
        the draw."""
        import numpy as np  # imported here: planning needs neither
        from PIL.Image import Resampling

        draw = np.random.default_rng([self.seed, *hashlib.sha256(data).digest()])
        filter_ = Resampling[self.interpolation.upper()]
        rows, columns = height_width(resolution)
        parts = (image.crop(self.box(*image.size, draw)) for _ in range(self.num_crops))
        return [np.asarray(part.resize((columns, rows), filter_)) for part in parts]

    def box(self, width: int, height: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
        """Return the left, top, right and bottom of a part, in pixels.

        As in RandomResizedCrop.get_params: the area and the logarithm of the aspect ratio are uniform. If ten draws do
        not fit into the image, the part is the largest one in the centre that `ratio` allows.
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
