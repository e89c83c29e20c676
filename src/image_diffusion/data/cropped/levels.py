"""Levels of crops that are arrays: the range of each channel, measured over the whole set or stated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.levels import DType, Levels
from image_diffusion.core.process.errors import log_line
from image_diffusion.data.config import Range
from image_diffusion.data.shards.records import ShardRecord, tar_path
from image_diffusion.data.shards.tar_layout import Layout

QUANTILES = 0.0001, 0.9999
"""Quantiles of a channel that are its measured range, robust to a few hot pixels."""
_HALF = 2**16  # number of values of 16 bits, half of a float32
_AT_ONCE = 64  # crops that are read at a time
_SAME_SIZE = 0.01  # relative tolerance of pixel sizes, for the rounded sides of scaled images

_Counts = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Numbers, ascending, and how often each occurs."""


def measure_levels(
    dtype: DType, ranges: Mapping[str, Range], folder: Path, layout: Layout, records: Sequence[ShardRecord]
) -> Levels:
    """Return the levels of a set of shards in a folder. ranges: of each channel by its name, in order. Raises
    ValueError for a constant channel."""
    names, stated = tuple(ranges), [_stated(chosen, dtype) for chosen in ranges.values()]
    low, high, clipped = [], [], []
    for name, ends, (values, count) in zip(names, stated, _histograms(folder, layout, records, stated), strict=True):
        least, most = ends or _measured(name, values, count)
        low.append(least)
        high.append(most)
        outside = count[(values < least) | (values > most)].sum()
        clipped.append(round(float(outside / max(1, count.sum())), 8))
    return Levels(
        dtype=dtype,
        channels=names,
        low=tuple(low),
        high=tuple(high),
        clipped=tuple(clipped),
        pixel_size=_pixel_size(records),
    )


def _stated(chosen: Range, dtype: str) -> tuple[float, float] | None:
    """Return the range that the configuration states for a channel; None if it has to be measured."""
    if chosen == "file":
        limits = np.iinfo(dtype)
        return float(limits.min), float(limits.max)
    return None if chosen == "measured" else chosen


def _pixel_size(records: Sequence[ShardRecord]) -> tuple[float, float] | None:
    """Return the pixel size of all crops; None if an image states none, or the sizes differ."""
    sizes = [sample.pixel_size for record in records for sample in record.samples]
    if not any(sizes):
        return None
    if missing := sizes.count([]):
        log_line(f"crop: {missing:,} of {len(sizes):,} images state no size of a pixel, so that samples have none.")
        return None
    height, width = np.median(sizes, axis=0)
    if not np.allclose(sizes, [height, width], rtol=_SAME_SIZE, atol=0):
        low, high = np.min(sizes), np.max(sizes)
        log_line(f"crop: pixels of the crops are {low:.4g} to {high:.4g} µm wide, so that samples have no size of one.")
        return None
    return float(height), float(width)


def _measured(name: str, values: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    """Return the quantiles of a channel, or its minimum and maximum if the quantiles are equal. counts: of each
    value. Raises ValueError for a constant channel."""
    used = np.flatnonzero(counts)
    least, most = values[used[0]], values[used[-1]]
    if least == most:
        raise ValueError(
            f"data.range: the channel {name} is {least:g} in all images. Leave it out of data.channels, or state its "
            "range."
        )
    shares = counts.cumsum() / counts.sum()
    low, high = (values[np.searchsorted(shares, quantile)] for quantile in QUANTILES)
    return (float(low), float(high)) if low < high else (float(least), float(most))


def _histograms(
    folder: Path, layout: Layout, records: Sequence[ShardRecord], stated: Sequence[tuple[float, float] | None]
) -> list[_Counts]:
    """Return the possible numbers of each channel, ascending, and their counts. stated: ranges; None: measured."""
    dtype, channels = np.dtype(layout.dtype), layout.shape[0]
    if dtype.kind == "f":
        return _counted_floats(folder, layout, records, stated)
    first, size = int(np.iinfo(dtype).min), 2 ** (8 * dtype.itemsize)
    totals = np.zeros((channels, size), np.int64)
    for pixels in _arrays(folder, layout, records):
        for channel in range(channels):
            numbers = pixels[:, channel].astype(np.int32).ravel() - first
            totals[channel] += np.bincount(numbers, minlength=size)
    return [(np.arange(first, first + size, dtype=np.float64), counts) for counts in totals]


def _counted_floats(
    folder: Path, layout: Layout, records: Sequence[ShardRecord], stated: Sequence[tuple[float, float] | None]
) -> list[_Counts]:
    """Return the result of `_histograms` for float32. Numbers are counted by the upper half of their bits. If this is
    the half of a quantile or of an end of the range, they are counted exactly; otherwise, the least number with this
    half represents all."""
    upper = np.zeros((layout.shape[0], _HALF), np.int64)
    for pixels in _arrays(folder, layout, records):
        for channel, counts in enumerate(upper):
            counts += np.bincount(_ordered_bits(pixels[:, channel]) >> 16, minlength=_HALF)
    exact = [
        {half: np.zeros(_HALF, np.int64) for half in _upper_halves_to_refine(counts, ends)}
        for counts, ends in zip(upper, stated, strict=True)
    ]
    for pixels in _arrays(folder, layout, records):
        for channel, halves in enumerate(exact):
            bits = _ordered_bits(pixels[:, channel])
            for half, counts in halves.items():
                counts += np.bincount(bits[bits >> 16 == half] & (_HALF - 1), minlength=_HALF)
    return [_merge_counts(counts, halves) for counts, halves in zip(upper, exact, strict=True)]


def _ordered_bits(numbers: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the bits of numbers as integers of the same order, [n]; -0 is mapped like 0."""
    bits = (numbers + np.float32(0)).ravel().view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _numbers_of(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the numbers of which `_ordered_bits` returns these bits."""
    plain = np.where(bits >> 31, bits & np.uint32(2**31 - 1), ~bits)
    return plain.view(np.float32).astype(np.float64)


def _upper_halves_to_refine(counts: NDArray[np.int64], stated: tuple[float, float] | None) -> set[int]:
    """Return the upper halves of the bits of the least and the greatest number, of the quantiles, and of the ends of a
    stated range. counts: of each half."""
    used, shares = np.flatnonzero(counts), counts.cumsum() / counts.sum()
    with np.errstate(over="ignore"):  # an end beyond float32 is infinite
        ends = _ordered_bits(np.array(stated or (), np.float64).astype(np.float32)) >> 16
    return {int(half) for half in (used[0], used[-1], *np.searchsorted(shares, QUANTILES), *ends)}


def _merge_counts(upper: NDArray[np.int64], exact: Mapping[int, NDArray[np.int64]]) -> _Counts:
    """Return the numbers that occur and their counts. upper: counts by upper half of bits. exact: by lower half, for
    some upper halves."""
    upper = upper.copy()
    upper[list(exact)] = 0
    lower = np.arange(_HALF, dtype=np.uint32)
    bits = np.concatenate([lower << 16, *(np.uint32(half << 16) | lower for half in exact)])
    counts = np.concatenate([upper, *exact.values()])
    used = np.flatnonzero(counts)
    used = used[np.argsort(bits[used])]
    return _numbers_of(bits[used]), counts[used]


def _arrays(folder: Path, layout: Layout, records: Sequence[ShardRecord]) -> Iterator[NDArray[Any]]:
    """Yield the crops of each shard in batches, [n, C, H, W], read from its tar."""
    offset = layout.offsets()[layout.members[0]]
    for record in records:
        if record.num_samples:
            tar = np.memmap(tar_path(folder, record.shard), np.uint8, "r")
            shape, strides = (record.num_samples, layout.nbytes), (layout.stride, 1)
            rows = np.lib.stride_tricks.as_strided(tar[offset:], shape, strides, writeable=False)
            for start in range(0, len(rows), _AT_ONCE):
                part = np.ascontiguousarray(rows[start : start + _AT_ONCE])
                yield part.view(layout.dtype).reshape(-1, *layout.shape)
