"""Images that are arrays: the numbers of a file as [C, H, W] of the configured type, upright.

Which axis is which, and the name of each channel, are taken from the file where it states them, and otherwise from the
configuration: nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.data.config import WHITE, Channels, DataConfig
from image_diffusion.data.crop.array_files import ArrayFile, BadImage, Undecided, read_array_file

_EXACT = 2**24
"""Integers up to this value are exact in float32."""
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
"""Function that puts an array [C, H, W] upright, by the tag Orientation of TIFF (revision 6.0)."""
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange rows and columns."""


@dataclass(frozen=True)
class Arrays:
    """Images of a file, one or more: [C, H, W] each, upright. format: of the file. pixel_size: height and width of a
    pixel in micrometres; None if the file does not state them."""

    images: list[NDArray[Any]]
    format: str
    pixel_size: tuple[float, float] | None


def read_array(data: bytes, config: DataConfig) -> Arrays:
    """Return the configured channels of the image, or of each page, of a file as `config.dtype`.

    Raises BadImage for numbers or channels that the configuration does not allow, Undecided if the axes or the pages
    to read are unknown or a package is missing. Other exceptions mean that the file is damaged.
    """
    assert config.dtype is not None
    stack = read_array_file(data, config.max_pixels, config.pages)
    numbers, axes = _select_pages(stack, config)
    is_turned, size = stack.orientation in _TURNED, stack.pixel_size
    if stack.axes is None or [axes.index(axis) for axis in "YX"] != [stack.axes.index(axis) for axis in "YX"]:
        size = None  # the configuration names other axes
    images = []
    for page in _pages(numbers, axes):
        pixels = _UPRIGHT.get(stack.orientation, _UPRIGHT[1])(page)
        chosen = pixels[_chosen(stack.names, len(pixels), config.channels, config.num_channels)]
        images.append(np.ascontiguousarray(_as_type(chosen, config.dtype, stack.missing)))
    return Arrays(images, stack.format, size[::-1] if size is not None and is_turned else size)


def crops_of_array(pixels: NDArray[Any], config: DataConfig, data: bytes) -> list[NDArray[Any]]:
    """Return the crops of an array [C, H, W]: each channel is scaled like a picture, in float32, and clipped to its own
    minimum and maximum, since bicubic filters overshoot."""
    channels = []
    for channel in pixels:
        if channel.dtype.kind == "u":
            image = Image.fromarray(channel).convert("F")  # a third faster than an array of float32, and equal
        else:
            image = Image.fromarray(channel.astype(np.float32, copy=False))
        views = config.crop.crops(image, config.size, config.background or WHITE, data)
        low, high = channel.min(), channel.max()
        channels.append([np.clip(view, low, high) for view in views])
    is_integer = np.issubdtype(pixels.dtype, np.integer)
    crops = (np.stack(view) for view in zip(*channels, strict=True))
    return [(np.rint(crop) if is_integer else crop).astype(pixels.dtype) for crop in crops]


def _select_pages(stack: ArrayFile, config: DataConfig) -> tuple[NDArray[Any], str]:
    """Return the numbers of a file and a letter for each axis. Along axes other than channels, rows and columns, the
    first index or all are kept, as `pages` states."""
    numbers = stack.numbers
    shape = " x ".join(map(str, numbers.shape))
    count = None if isinstance(config.channels, dict) else config.num_channels
    axes = config.axes or stack.axes or _axes_by_count(numbers.shape, count)
    if axes is None:
        raise Undecided(
            f"nothing states which axis of {shape} has the {config.num_channels} channels. Set data.axes, a letter for "
            "each axis: C channel, Y row, X column, for example YXC."
        )
    if len(axes) != numbers.ndim or axes.count("Y") != 1 or axes.count("X") != 1 or axes.count("C") > 1:
        raise BadImage(f"other axes: {shape} numbers are not {axes}")
    for number, axis in enumerate(axes):
        if axis in "CYX" or numbers.shape[number] == 1:
            continue
        if config.pages is None:
            raise Undecided(
                f"the file has {shape} numbers along the axes {axes}. Set data.axes, with C in the place of the "
                f"{numbers.shape[number]} if they are channels; or data.pages to first to take the first of them, or "
                "to all to take each as an image."
            )
        if config.pages == "first":
            numbers = numbers.take([0], number)
    return numbers, axes


def _pages(numbers: NDArray[Any], axes: str) -> Iterator[NDArray[Any]]:
    """Yield an image [C, H, W] for each index along the axes other than channels, rows and columns."""
    if "C" not in axes:
        numbers, axes = numbers[np.newaxis], "C" + axes
    others = [number for number, axis in enumerate(axes) if axis not in "CYX"]
    numbers = numbers.transpose(*others, *map(axes.index, "CYX"))
    yield from numbers.reshape(max(1, math.prod(numbers.shape[:-3])), *numbers.shape[-3:])


def _axes_by_count(shape: tuple[int, ...], count: int | None) -> str | None:
    """Return the axes of an array whose file states none; None unless the number of channels decides them. count:
    number of channels; None if the configuration selects some, so that their number is unknown."""
    if len(shape) == 2:
        return "YX"
    fitting = [axes for axes in ("CYX", "YXC") if len(shape) == 3 and shape[axes.index("C")] == count]
    return fitting[0] if len(fitting) == 1 else None


def _chosen(names: tuple[str, ...], count: int, channels: Channels, expected: int) -> list[int]:
    """Return the indices of the configured channels in a file. names: of the file's channels, if stated. count: number
    of the file's channels. channels, expected: the configured channels and their number."""
    if isinstance(channels, dict):
        places = list(channels)
        if max(places) >= count:
            raise BadImage(f"too few channels: {count}, but data.channels has {max(places)}, counted from 0")
        return places
    if not isinstance(channels, int):
        own = [_channel_index(name, names) for name in channels]
        places = [place for place in own if place is not None]
        if len(set(places)) == len(channels):
            return places
        if places:
            raise BadImage(f"other channels: {', '.join(names)}, but data.channels names {', '.join(channels)}")
    if expected != count:
        stated = f" ({', '.join(names)})" if names else ""
        raise BadImage(f"other channels: {count}{stated}, but data.channels has {expected}")
    return list(range(count))


def _channel_index(name: str, names: tuple[str, ...]) -> int | None:
    """Return the index of a name in `names`, ignoring case if there is no exact match; None if it is missing."""
    if name in names:
        return names.index(name)
    folded = [other.casefold() for other in names]
    return folded.index(name.casefold()) if name.casefold() in folded else None


def _as_type(pixels: NDArray[Any], dtype: str, missing: float) -> NDArray[Any]:
    """Convert numbers without loss. Raises BadImage for numbers that the type cannot hold, and for missing data."""
    if pixels.size == 0 or np.iscomplexobj(pixels) or pixels.dtype.kind not in "biuf":
        raise BadImage(f"no numbers: {pixels.dtype} of {' x '.join(map(str, pixels.shape))}")
    with np.errstate(over="ignore"):
        count = 0 if math.isnan(missing) else np.count_nonzero(pixels == missing)
    if count:
        raise BadImage(
            f"missing data: {count:,} of {pixels.size:,} numbers are {missing:.10g}, which the file declares as "
            "missing (GDAL_NODATA): crop them off, fill them, or remove the declaration"
        )
    low, high = pixels.min(), pixels.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadImage("numbers that are not finite")
    if dtype == "float32" and pixels.dtype.kind == "f":
        with np.errstate(over="ignore"):
            is_held = bool(np.isfinite(np.array([low, high]).astype(np.float32)).all())
    elif dtype == "float32":
        is_held = max(-int(low), int(high)) <= _EXACT
    else:
        limits = np.iinfo(dtype)
        is_held = limits.min <= low and high <= limits.max
        is_held = is_held and (pixels.dtype.kind != "f" or bool((pixels == np.rint(pixels)).all()))
    if not is_held:
        raise BadImage(f"numbers that {dtype} does not hold: {pixels.dtype} from {low:g} to {high:g}")
    return pixels.astype(dtype, copy=False)
