"""Readers of images that are arrays: `.npy`, `.npz`, TIFF, DICOM, and what Pillow reads without loss.

A file is read as numbers [C, H, W] of its own type. Which axis is which, and the name of each channel, are taken from
the file where it states them, and otherwise from the configuration: nothing is assumed. Numbers keep their meaning: the
rescaling that DICOM states is applied, and files in which 0 is white are inverted.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_diffusion.data.config import MOST_CHANNELS, WHITE, DataConfig
from image_diffusion.data.crop.stored import describe

if TYPE_CHECKING:
    from tifffile import TiffPage

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_EXACT = 2**24
"""Integers up to here are numbers of float32."""
_UPRIGHT: dict[int, Callable[[NDArray[Any]], NDArray[Any]]] = {
    1: lambda a: a,
    2: lambda a: a[:, :, ::-1],
    3: lambda a: a[:, ::-1, ::-1],
    4: lambda a: a[:, ::-1],
    5: lambda a: a.transpose(0, 2, 1),
    6: lambda a: a.transpose(0, 2, 1)[:, :, ::-1],
    7: lambda a: a.transpose(0, 2, 1)[:, ::-1, ::-1],
    8: lambda a: a.transpose(0, 2, 1)[:, ::-1],
}
"""By the tag Orientation of TIFF (revision 6.0): what puts an array [C, H, W] upright."""


class BadImage(Exception):  # noqa: N818 - a verdict on a file, not a failure of the program
    """Raised for a file that gives no crop, with the reason in a few words."""


class Undecided(ValueError):  # noqa: N818 - likewise
    """Raised for a file that needs a person to decide how it is read. The stage stops."""


@dataclass(frozen=True)
class Stack:
    """Numbers of a file. axes: a letter for each: Y, X, C for channels, others as tifffile has them; None where the
    file does not state them. names: of the channels, where the file states them. format: of the file."""

    numbers: NDArray[Any]
    axes: str | None
    format: str
    names: tuple[str, ...] = ()
    orientation: int = 1


def read_array(data: bytes, config: DataConfig) -> tuple[NDArray[Any], str]:
    """Return the chosen channels of an image file, [C, H, W] of `config.dtype`, and the name of its format.

    Raises BadImage for numbers or channels that the configuration does not allow, Undecided for axes that nothing
    states. Other exceptions mean that the file is damaged.
    """
    stack = _read(data, config)
    pixels = _UPRIGHT.get(stack.orientation, _UPRIGHT[1])(_arranged(stack, config))
    assert config.dtype is not None
    return np.ascontiguousarray(_as_type(pixels[_chosen(stack.names, len(pixels), config)], config.dtype)), stack.format


def crops_of_array(pixels: NDArray[Any], config: DataConfig, data: bytes) -> list[NDArray[Any]]:
    """Return the crops of an array [C, H, W]: each channel is scaled as a picture is, in float32, and held to its own
    least and greatest number, since bicubic filters overshoot."""
    channels = []
    for channel in pixels:
        image = Image.fromarray(channel.astype(np.float32))
        views = config.crop.crops(image, config.size, config.background or WHITE, data)
        channels.append([np.clip(view, channel.min(), channel.max()) for view in views])
    is_integer = np.issubdtype(pixels.dtype, np.integer)
    crops = (np.stack(view) for view in zip(*channels, strict=True))
    return [(np.rint(crop) if is_integer else crop).astype(pixels.dtype) for crop in crops]


def _read(data: bytes, config: DataConfig) -> Stack:
    if data.startswith(b"\x93NUMPY"):
        return Stack(np.load(io.BytesIO(data), allow_pickle=False), None, "NPY")
    if data[:4] in _TIFF:
        return _tiff(data, config)
    if data[128:132] == b"DICM":
        return _dicom(data, config)
    if data.startswith(b"PK") and zipfile.is_zipfile(io.BytesIO(data)):
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            _check_pixels([max((member.file_size for member in arrays.zip.infolist()), default=0) // 8], config)
            if len(arrays.files) != 1:
                raise BadImage(f"not one array: the file holds {len(arrays.files)}")
            return Stack(arrays[arrays.files[0]], None, "NPZ")
    return _picture(data, config)


def _tiff(data: bytes, config: DataConfig) -> Stack:
    """Read a TIFF, its axes as OME, ImageJ or the tags state them."""
    from tifffile import TiffFile  # not for pictures

    with TiffFile(io.BytesIO(data)) as file:
        if len(file.series) > 1 and config.pages is None:
            shapes = " and ".join(" x ".join(map(str, series.shape)) for series in file.series[:2])
            raise Undecided(
                f"the file holds {len(file.series)} images, of {shapes}. Set data.pages to first to take the first."
            )
        series, page = file.series[0], file.series[0].keyframe
        if page.photometric == 3:
            raise BadImage("a palette: its numbers are names of colours")
        _check_pixels(series.shape, config)
        numbers, axes = series.asarray(), series.axes
        if page.photometric == 0:
            numbers = _inverted(numbers, page.bitspersample)
        return Stack(numbers, axes.replace("S", "C"), "TIFF", _ome_names(file.ome_metadata), _orientation(page))


def _orientation(page: TiffPage) -> int:
    tag = page.tags.get("Orientation")
    return int(tag.value) if tag is not None else 1


def _ome_names(metadata: str | None) -> tuple[str, ...]:
    """Return the names of the channels in OME-XML; none where a channel has no name."""
    if metadata is None:
        return ()
    from xml.etree import ElementTree  # expat refuses entities that grow since 2.4.1

    pixels = next((node for node in ElementTree.fromstring(metadata).iter() if node.tag.endswith("}Pixels")), None)
    names = [node.get("Name") for node in pixels or () if node.tag.endswith("}Channel")]
    return tuple(str(name) for name in names) if all(names) else ()


def _dicom(data: bytes, config: DataConfig) -> Stack:
    """Read a DICOM file: stored numbers, inverted where 0 is white, then rescaled by slope and intercept or the
    modality LUT (PS3.3 C.7.6.3, C.11.1). The window is left out: it is for the eye."""
    try:
        from pydicom import dcmread
        from pydicom.pixels import apply_modality_lut
    except ModuleNotFoundError:
        raise Undecided(
            "DICOM files need the package pydicom. Install it: pip install 'image-diffusion[arrays]'."
        ) from None
    file = dcmread(io.BytesIO(data))
    if "SharedFunctionalGroupsSequence" in file or "PerFrameFunctionalGroupsSequence" in file:
        raise BadImage("an enhanced DICOM file, of which each frame may be rescaled: save it as classic DICOM or .npy")
    _check_pixels([file.Rows, file.Columns, int(file.get("NumberOfFrames", 1))], config)
    numbers, kind = file.pixel_array, file.PhotometricInterpretation
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        raise BadImage(f"not grey: a DICOM file of {kind}")
    if kind == "MONOCHROME1":
        numbers = -1 - numbers if file.PixelRepresentation else _inverted(numbers, file.BitsStored)
    return Stack(apply_modality_lut(numbers, file), "YX" if numbers.ndim == 2 else "ZYX", "DICOM")


def _picture(data: bytes, config: DataConfig) -> Stack:
    """Read what Pillow reads, with every bit of its numbers."""
    with Image.open(io.BytesIO(data)) as image:
        _check_pixels(image.size, config)
        stored = describe(image, data)
        if getattr(image, "is_animated", False):
            raise BadImage("an animation, which is no array")
        if stored.bits > 8 and not stored.is_exact:
            raise BadImage("colour of 16 bits, of which Pillow reads the high byte: save it as TIFF or .npy")
        if image.mode not in ("1", "L", "LA", "RGB", "RGBA", "F", "I") and not image.mode.startswith("I;16"):
            raise BadImage(f"no plain numbers: a picture of mode {image.mode}")
        format_ = str(image.format)
        numbers = np.asarray(ImageOps.exif_transpose(image))
    if stored.bits > 8 and stored.white and stored.white != stored.decoded_white:
        # Pillow has scaled them to 16 bits (PNM, JPEG 2000)
        numbers = np.rint(numbers.astype(np.float64) * stored.white / stored.decoded_white).astype(np.int64)
    return Stack(numbers, "YX" if numbers.ndim == 2 else "YXC", format_)


def _inverted(numbers: NDArray[Any], bits: int) -> NDArray[Any]:
    if not np.issubdtype(numbers.dtype, np.unsignedinteger):
        raise BadImage(f"white is 0, but the numbers are {numbers.dtype}, which have no black")
    inverted: NDArray[Any] = numbers.dtype.type(2**bits - 1) - numbers
    return inverted


def _check_pixels(shape: Sequence[int], config: DataConfig) -> None:
    """Judge an image by its header, before anything is decoded."""
    if np.prod(shape, dtype=np.float64) > MOST_CHANNELS * config.max_pixels:
        sides = " x ".join(map(str, shape))
        raise BadImage(
            f"too large: {sides} numbers, more than {MOST_CHANNELS} channels of max_pixels = {config.max_pixels}"
        )


def _arranged(stack: Stack, config: DataConfig) -> NDArray[Any]:
    """Return the numbers as [C, H, W]."""
    numbers = stack.numbers
    shape = " x ".join(map(str, numbers.shape))
    axes = config.axes or stack.axes or _axes_by_count(numbers.shape, config)
    if axes is None:
        raise Undecided(
            f"nothing states which axis of {shape} has the {config.num_channels} channels. Set data.axes, a letter for "
            "each axis: C channel, Y row, X column, for example YXC."
        )
    if len(axes) != numbers.ndim or axes.count("Y") != 1 or axes.count("X") != 1 or axes.count("C") > 1:
        raise BadImage(f"other axes: {shape} numbers are not {axes}")
    for axis in range(len(axes) - 1, -1, -1):
        if axes[axis] in "CYX":
            continue
        if numbers.shape[axis] > 1 and config.pages is None:
            raise Undecided(
                f"the file has {shape} numbers along the axes {axes}. Set data.axes, with C in the place of the "
                f"{numbers.shape[axis]} if they are channels; or data.pages to first to take the first of them."
            )
        numbers = numbers.take(0, axis)
        axes = axes[:axis] + axes[axis + 1 :]
    if "C" not in axes:
        numbers, axes = numbers[np.newaxis], "C" + axes
    return numbers.transpose(*map(axes.index, "CYX"))


def _axes_by_count(shape: tuple[int, ...], config: DataConfig) -> str | None:
    """Return the axes of an array whose file states none, where the number of channels leaves one answer."""
    if len(shape) == 2:
        return "YX"
    count = config.num_channels if not isinstance(config.channels, dict) else None
    fitting = [axes for axes in ("CYX", "YXC") if len(shape) == 3 and shape[axes.index("C")] == count]
    return fitting[0] if len(fitting) == 1 else None


def _chosen(names: tuple[str, ...], count: int, config: DataConfig) -> list[int]:
    """Return the places of the chosen channels in a file. names: of its channels, where it states them."""
    channels = config.channels
    if isinstance(channels, dict):
        places = list(channels)
        if max(places) >= count:
            raise BadImage(f"too few channels: {count}, but data.channels has {max(places)}, counted from 0")
        return places
    if not isinstance(channels, int) and set(channels) <= set(names):
        return [names.index(name) for name in channels]
    if config.num_channels != count:
        stated = f" ({', '.join(names)})" if names else ""
        raise BadImage(f"other channels: {count}{stated}, but data.channels has {config.num_channels}")
    return list(range(count))


def _as_type(pixels: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert numbers without loss. Raises BadImage for numbers that the type does not hold."""
    if pixels.size == 0 or np.iscomplexobj(pixels) or pixels.dtype.kind not in "biuf":
        raise BadImage(f"no numbers: {pixels.dtype} of {' x '.join(map(str, pixels.shape))}")
    low, high = pixels.min(), pixels.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadImage("numbers that are not finite")
    if dtype == "float32":
        is_held = pixels.dtype.kind == "f" or max(-int(low), int(high)) <= _EXACT
    else:
        limits = np.iinfo(dtype)
        is_held = limits.min <= low and high <= limits.max
        is_held = is_held and (pixels.dtype.kind != "f" or bool((pixels == np.rint(pixels)).all()))
    if not is_held:
        raise BadImage(f"numbers that {dtype} does not hold: {pixels.dtype} from {low:g} to {high:g}")
    return pixels.astype(dtype)
