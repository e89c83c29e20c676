"""Methods that cut one or more crops from an image. Each is a class and an entry in `AnyCrop`.

NumPy and Pillow are imported where they are needed: planning needs neither.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size, height_width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_NEARLY = 0.1
"""Share of a side that is cut off instead of adding one more crop, which would nearly repeat the one before it."""
_ATTEMPTS = 10

Colour = tuple[int, int, int]
Range = tuple[float, float]


class CropMethod(Config):
    """Base of the methods."""

    type: str
    """Name of the method."""
    has_one_scale: ClassVar[bool] = True
    """True if every part of an image is scaled by the ratio of `scaled_size` to its size."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the plain data that decide the pixels."""

    @abstractmethod
    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        """Return the crops of an image, each [H, W] or [H, W, C] in the image's mode. data: bytes of the file."""

    @abstractmethod
    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        """Return the size (width, height) that an image has before anything is cut off, or bars are added."""


class AdmCrop(CropMethod):
    """Halve with a box filter while the shorter side is at least twice the resolution, scale bicubically, cut out the
    centre (Dhariwal and Nichol 2021, guided-diffusion)."""

    type: Literal["adm"] = "adm"
    """The centre crop of ADM."""

    def identity(self) -> dict[str, Any]:
        return {"method": "adm-centre-crop"}

    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        from image_diffusion.data.crop.centre_crop import centre_crop

        return [centre_crop(image, resolution)]

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        from image_diffusion.data.crop.centre_crop import scaled_size

        return scaled_size(width, height, resolution)


class ResizeCrop(CropMethod):
    """Scale with antialiasing, so that the shorter side equals the resolution, and cut out the centre. The bytes are
    those of torchvision's `Resize(resolution)` and `CenterCrop(resolution)` on a Pillow image, as in
    recurrent-interface-network-pytorch and DALLE-pytorch."""

    type: Literal["resize"] = "resize"
    """torchvision's Resize and CenterCrop."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """Resampling filter, named as in torchvision's Resize. OpenAI's DALL-E uses lanczos."""

    def identity(self) -> dict[str, Any]:
        return {"method": "resize-centre-crop", "interpolation": self.interpolation}

    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        import numpy as np
        from PIL.Image import Resampling

        width, height = self.scaled_size(*image.size, resolution)
        if image.size != (width, height):
            image = image.resize((width, height), Resampling[self.interpolation.upper()])
        rows, columns = height_width(resolution)
        left, top = round((width - columns) / 2), round((height - rows) / 2)
        return [np.asarray(image.crop((left, top, left + columns, top + rows)))]

    def scaled_size(self, width: int, height: int, resolution: int | Size) -> tuple[int, int]:
        rows, columns = height_width(resolution)
        if width * rows <= height * columns:
            return columns, int(columns * height / width)
        return int(rows * width / height), rows


class Pad(CropMethod):
    """Scale bicubically, so that the whole image just fits into the crop, and fill the rest with `data.background`, or
    with transparent pixels if the crops have an alpha channel. Nothing is cut off, and a model learns the bars."""

    type: Literal["pad"] = "pad"
    """The whole image, with bars (letterbox)."""

    def identity(self) -> dict[str, Any]:
        return {"method": "pad", "cuts": False}

    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        import numpy as np
        from PIL import Image as Pillow
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
        """Return the size (width, height) before bars are added, one pixel at least."""
        rows, columns = height_width(resolution)
        if width * rows >= height * columns:
            return columns, max(1, round(height / width * columns))
        return max(1, round(width / height * rows)), rows


class MultiCrop(AdmCrop):
    """Scale as ADM's crop does, then cut out crops that are evenly spaced along the longer side, from one end to the
    other. Square crops: one from a square image, two from an image of 3 : 2, three from a panorama of 3 : 1. All crops
    of an image are in one split."""

    type: Literal["multi"] = "multi"  # type: ignore[assignment]
    """Several crops along the longer side of an image."""
    max_crops: int = Field(4, ge=2, le=64)
    """Maximum number of crops per image; in longer images, the parts between the crops are lost."""

    def identity(self) -> dict[str, Any]:
        return {"method": "multi-crop", "max_crops": self.max_crops, "cuts": False}

    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        """Return the crops from left to right or top to bottom."""
        import numpy as np
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


class RandomResizedCrop(CropMethod):
    """Cut out parts of random area, aspect ratio and position, and scale them with antialiasing (Szegedy et al. 2015,
    as in torchvision's RandomResizedCrop). `seed` and the bytes of the file decide the parts, so they are reproducible
    on any machine. Each image has `num_crops` parts, all in one split."""

    type: Literal["random_resized"] = "random_resized"
    """Several random parts of every image, drawn once and stored."""
    has_one_scale: ClassVar[bool] = False
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
        return {"method": "random-resized-crop", **self.model_dump(mode="json", exclude={"type"})}

    def crops(self, image: Image, resolution: int | Size, background: Colour, data: bytes) -> list[NDArray[np.uint8]]:
        """Return the parts. The bytes of the file seed the draw."""
        import numpy as np
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


AnyCrop = Annotated[AdmCrop | ResizeCrop | Pad | MultiCrop | RandomResizedCrop, Field(discriminator="type")]
