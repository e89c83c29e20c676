"""Levels of crops that are arrays: the range of each channel, measured over the whole set or stated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.levels import Levels
from image_diffusion.core.process.errors import log_line
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.records import ShardRecord, tar_path
from image_diffusion.data.shards.tar_layout import Layout

QUANTILES = 0.0001, 0.9999
"""Quantiles of the numbers of a channel that are its measured range: a few hot pixels do not decide."""
_BINS = 2**16  # in which floating-point numbers are counted, between the least and the greatest
_AT_ONCE = 64  # crops
_SAME_SIZE = 0.01  # relative difference of the sizes of pixels, which rounded sides of scaled images have


def measure_levels(config: DataConfig, folder: Path, layout: Layout, records: Sequence[ShardRecord]) -> Levels:
    """Return the levels of a set of shards in a folder. Raises ValueError for a channel of one number alone."""
    assert config.dtype is not None
    names = config.channel_names
    edges, counts = _counted(folder, layout, records)
    low, high, clipped = [], [], []
    for name, values, count in zip(names, edges, counts, strict=True):
        chosen = config.range.get(name, "measured") if isinstance(config.range, dict) else config.range or "measured"
        if chosen == "file":
            limits = np.iinfo(config.dtype)
            chosen = float(limits.min), float(limits.max)
        least, most = _measured(name, values, count) if chosen == "measured" else chosen
        low.append(least)
        high.append(most)
        outside = count[(values < least) | (values > most)].sum()
        clipped.append(round(float(outside / max(1, count.sum())), 8))
    return Levels(
        dtype=config.dtype,
        channels=names,
        low=tuple(low),
        high=tuple(high),
        clipped=tuple(clipped),
        pixel_size=_pixel_size(records),
    )


def _pixel_size(records: Sequence[ShardRecord]) -> tuple[float, float] | None:
    """Return the size of a pixel of all crops; None where an image states none, or the sizes differ."""
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
    """Return the quantiles of numbers that occur so often; the least and the greatest where the quantiles are equal."""
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


def _counted(
    folder: Path, layout: Layout, records: Sequence[ShardRecord]
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.int64]]]:
    """Return the numbers that may occur in each channel, ascending, and how often each does: every integer; of
    floating-point numbers the centres of 65,536 bins between the least and the greatest."""
    dtype, channels = np.dtype(layout.dtype), layout.shape[0]
    if dtype.kind != "f":
        first, size = int(np.iinfo(dtype).min), 2 ** (8 * dtype.itemsize)
        totals = np.zeros((channels, size), np.int64)
        for pixels in _arrays(folder, layout, records):
            for channel in range(channels):
                numbers = pixels[:, channel].astype(np.int32).ravel() - first
                totals[channel] += np.bincount(numbers, minlength=size)
        return [np.arange(first, first + size, dtype=np.float64)] * channels, list(totals)
    low, high = np.full(channels, np.inf), np.full(channels, -np.inf)
    for pixels in _arrays(folder, layout, records):
        low, high = np.minimum(low, pixels.min((0, 2, 3))), np.maximum(high, pixels.max((0, 2, 3)))
    totals = np.zeros((channels, _BINS), np.int64)
    for pixels in _arrays(folder, layout, records):
        for channel in range(channels):
            totals[channel] += np.histogram(pixels[:, channel], _BINS, (low[channel], high[channel]))[0]
    return [np.linspace(low[channel], high[channel], _BINS) for channel in range(channels)], list(totals)


def _arrays(folder: Path, layout: Layout, records: Sequence[ShardRecord]) -> Iterator[NDArray[Any]]:
    """Yield the crops of each shard, [n, C, H, W], where they lie in its file."""
    offset = layout.offsets()[layout.members[0]]
    for record in records:
        if record.num_samples:
            tar = np.memmap(tar_path(folder, record.shard), np.uint8, "r")
            shape, strides = (record.num_samples, layout.nbytes), (layout.stride, 1)
            rows = np.lib.stride_tricks.as_strided(tar[offset:], shape, strides, writeable=False)
            for start in range(0, len(rows), _AT_ONCE):
                part = np.ascontiguousarray(rows[start : start + _AT_ONCE])
                yield part.view(layout.dtype).reshape(-1, *layout.shape)
