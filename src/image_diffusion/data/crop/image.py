"""One image file -> its crop or crops, or the reason why it has none.

Treatment of images that are not plain RGB, each recorded as a flag of the sample:

  exif          stored turned or mirrored, by Exif or XMP: put upright, as Pillow's `exif_transpose` does
  gray          grey or black and white: the grey value in each channel
  palette       looked up before any resizing
  alpha         transparent: composed over the configured background, unless the crop keeps alpha
  cmyk          converted by Pillow without a colour profile, as the original does
  colour_space  YCbCr, HSV, LAB: converted
  16bit         more than 8 bits a channel: scaled to 8, as in `stored`; of colour Pillow keeps the high byte
  first_frame   animated or of several pages: the first one
  profile       has a colour profile other than sRGB: it is ignored, or applied if data.profile is convert
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from image_diffusion.data.config import WHITE, DataConfig
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.arrays import crops_of_array, read_array
from image_diffusion.data.crop.jpeg_damage import FILLED, is_filled
from image_diffusion.data.crop.stored import WIDE, StoredPixels, describe, pages

FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA",
)  # fmt: skip
"""Formats that are read, by Pillow's names: all of them decode without running another program. JPEG includes MPO."""

_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Brands in the header of HEIC files, as phones write them. Pillow recognises the last two as AVIF, too."""

READER = 2
"""Version of the reader of files. Shards of an earlier version are cropped again."""
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_PROFILE_MODES = {"L": "L", "LA": "L", "RGB": "RGB", "RGBA": "RGB", "P": "RGB", "PA": "RGB", "CMYK": "CMYK"}
"""Mode of an image in its colour profile (ICC), by the mode of the image."""
_TOLERANCE = 3
"""Maximum difference from sRGB of profiles that are named sRGB, in levels of 255."""
_ORIENTATION = 0x0112
_TGA_DESCRIPTOR = 17
"""Offset of the byte whose low four bits are the number of alpha bits of a pixel (Truevision TGA 2.0)."""
_CORE: Any = Image.core  # type: ignore[attr-defined]
_BLOCK = 2**31 - 4096
"""Largest block of memory that Pillow uses, in bytes."""


@dataclass(frozen=True)
class Crop:
    """crops: [C, H, W] each, one or more; of pictures uint8. size: (width, height) of the upright image. flags: sorted.
    format, mode: of the file, by Pillow's names. values: `StoredPixels.values` of the file. pixel_size: height and
    width of a pixel of the crops, in micrometres; empty where it is not known."""

    crops: list[NDArray[Any]]
    size: tuple[int, int]
    flags: list[str]
    format: str
    mode: str
    values: list[int] = field(default_factory=list)
    pixel_size: list[float] = field(default_factory=list)


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings and lift its own limit of pixels: `crop_image` holds a stricter one. An image lies in
    one block of memory, however large, so that its pixels can be shared with the compiled crop."""
    limit, block = Image.MAX_IMAGE_PIXELS, _CORE.get_block_size()
    Image.MAX_IMAGE_PIXELS = None
    _CORE.set_block_size(_BLOCK)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
        _CORE.set_block_size(block)


Decode = Callable[[Image.Image, bytes, DataConfig], tuple[Image.Image, set[str], list[int]]]
"""An opened image, its file, and the section data -> the image upright and in the mode of the crops, its flags and the
values that it uses."""


def crop_image(data: bytes, config: DataConfig, decode: Decode | None = None) -> Crop:
    """Return the crop or crops of an image file from its bytes. decode: replaces the decoding of pictures; its images
    of mode P are labels, which every crop scales by nearest neighbour.

    Raises BadImage; and Undecided if the user has to decide how the file is read. Call it inside `quiet_pillow()`.
    """
    if not data:
        raise BadImage("an empty file")
    if config.dtype is not None:
        return _crop_array(data, config)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, config)
            kind = str(image.format), image.mode
            upright, flags, values = (decode or _decode)(image, data, config)
    except (BadImage, Undecided):
        raise
    except UnidentifiedImageError:
        raise BadImage(_not_read(data)) from None
    except Exception as error:  # decoders raise nearly any exception for damaged files
        raise BadImage(f"damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    crops = config.crop.crops(upright, config.size, config.background or WHITE, data)
    channels_last = [crop[:, :, None] if crop.ndim == 2 else crop for crop in crops]
    crops = [np.ascontiguousarray(crop.transpose(2, 0, 1)) for crop in channels_last]
    return Crop(crops, upright.size, sorted(flags), *kind, values)


def _crop_array(data: bytes, config: DataConfig) -> Crop:
    try:
        read = read_array(data, config)
    except (BadImage, Undecided, ModuleNotFoundError):
        raise
    except Exception as error:  # as above
        raise BadImage(f"damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    height, width = read.images[0].shape[1:]
    _check_size((width, height), config)
    crops = [crop for pixels in read.images for crop in crops_of_array(pixels, config, data)]
    pixel_size: list[float] = []
    if read.pixel_size is not None and config.crop.has_one_scale:
        scaled_width, scaled_height = config.crop.scaled_size(width, height, config.size)
        pixel_size = [read.pixel_size[0] * height / scaled_height, read.pixel_size[1] * width / scaled_width]
    return Crop(crops, (width, height), [], read.format, str(config.dtype), pixel_size=pixel_size)


def _check_size(size: tuple[int, int], config: DataConfig) -> None:
    """Raise BadImage by the size in the header, before the image is decoded."""
    width, height = size
    if width * height > config.max_pixels:
        raise BadImage(f"too large: {width} x {height} pixels, more than max_pixels = {config.max_pixels}")
    if min(size) < config.min_side:
        raise BadImage(f"too small: {width} x {height} pixels, less than min_side = {config.min_side}")
    scaled = config.crop.scaled_size(width, height, config.size)
    if scaled[0] * scaled[1] > max(config.max_pixels, config.size[0] * config.size[1]):
        raise BadImage(f"too thin: {width} x {height} pixels would be scaled to {scaled[0]} x {scaled[1]}")


def _not_read(data: bytes) -> str:
    """Return the reason why Pillow does not recognise a file as one of `FORMATS`."""
    try:
        with Image.open(io.BytesIO(data)) as image:  # of any format; nothing is decoded
            return f"a format that is not read ({image.format}); known: {', '.join(FORMATS)}"
    except Exception:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC:
            return f"a format that is not read (HEIC); known: {', '.join(FORMATS)}"
        return f"not an image: it starts with {data[:8]!r}"


def _decode(image: Image.Image, data: bytes, config: DataConfig) -> tuple[Image.Image, set[str], list[int]]:
    """Return the image upright and in the mode of the crops, with its flags and the values that it uses."""
    stored, flags = describe(image, data), set()
    if _has_more(image, data, config.pages):
        flags.add("first_frame")
    is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)  # stated by Exif or XMP
    image.load()
    if image.format in ("JPEG", "MPO") and is_filled(data, _last_pixel(image)):
        raise BadImage(f"damaged: {FILLED}")
    if is_turned:
        flags.add("exif")
        image = ImageOps.exif_transpose(image)
    profile = image.info.get("icc_profile") or b""
    values = stored.values(image)
    if stored.bits > 8:
        flags.add("16bit")
        image = _as_8bit(image, stored, config.range if isinstance(config.range, tuple) else None)
    if image.format == "TGA" and image.mode in ("LA", "RGBA") and not data[_TGA_DESCRIPTOR] & 15:
        image = image.convert(image.mode[:-1])  # no bit of a pixel is opacity
    match image.mode:
        case "L" | "1":
            flags.add("gray")
        case "LA" | "La":
            flags |= {"gray", "alpha"}
        case "P" | "PA":
            flags.add("palette")
        case "CMYK":
            flags.add("cmyk")
        case "YCbCr" | "HSV" | "LAB":
            flags.add("colour_space")
    if image.mode in ("RGBA", "RGBa", "PA") or "transparency" in image.info:
        flags.add("alpha")
    has_profile = bool(profile) and image.mode in _PROFILE_MODES
    if has_profile and (conversion := _conversion(profile, _PROFILE_MODES[image.mode])):
        flags.add("profile")
        image = _converted(image, conversion) if config.profile == "convert" else image
    mode = _MODES[config.num_channels]
    if "alpha" in flags and config.num_channels in (1, 3):
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[1] == 0:
            raise BadImage("nothing is visible: every pixel is transparent")
        behind = Image.new("RGBA", image.size, (*(config.background or WHITE), 255))
        image = Image.alpha_composite(behind, image).convert("RGB")
    return image if image.mode == mode else image.convert(mode), flags, values


def _last_pixel(image: Image.Image) -> tuple[int, ...]:
    pixel: Any = image.getpixel((image.width - 1, image.height - 1))
    return pixel if isinstance(pixel, tuple) else (pixel,)


def _has_more(image: Image.Image, data: bytes, chosen: str | None) -> bool:
    """True if a file holds more images than the one that is read. Raises Undecided for a TIFF of several pages if
    `chosen` is None: they may be a stack, channels or a document."""
    if not getattr(image, "is_animated", False):
        return False
    if image.format != "TIFF":
        return True
    count = pages(data)
    if count > 1 and chosen is None:
        raise Undecided(f"the file holds {count:,} pages. Set data.pages to first to take the first page of each file.")
    return count > 1


def _as_8bit(image: Image.Image, stored: StoredPixels, limits: tuple[float, float] | None) -> Image.Image:
    if image.mode in WIDE:
        try:
            return stored.scaled(image, limits)
        except ValueError as error:
            raise BadImage(str(error)) from None
    if limits is not None or stored.decoded_white < 255:
        raise BadImage("colour of 16 bits, of which the high byte alone is read, in a range below 65,535")
    return image


def _converted(image: Image.Image, conversion: ImageCms.ImageCmsTransform) -> Image.Image:
    """Convert an image to sRGB: RGB, or RGBA where it is transparent."""
    opacity = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    converted = conversion.apply(image.convert(_PROFILE_MODES[image.mode]))
    if opacity is not None:
        converted.putalpha(opacity)
    return converted


@lru_cache(maxsize=16)
def _conversion(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion to sRGB of the images of a profile, which have this mode in it; None where it would change
    next to nothing, or the profile is damaged or of other channels."""
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
