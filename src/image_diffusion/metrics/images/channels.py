"""Comparison of arrays channel by channel: distribution of values, power spectrum, and correlation between channels.
For images that no published detector was trained on.

Each statistic is a function of sums over images, stored per block of the jackknife, so that leaving out a block costs
one subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each
from image_diffusion.metrics.features.base import ImageSet

_BINS = 256
_AT_ONCE = 256  # images
_LEAST_POWER = 1e-12


@dataclass(frozen=True)
class ChannelSums:
    """Sums over the images of each block. counts: histogram of the values of each channel, [B, C, 256]. spectrum: power
    by distance from the zero frequency, [B, C, R]. first: sums of the values, [B, C]. second: sums of the products of
    channels, [B, C, C]. pixels: number of pixels, [B]."""

    counts: Tensor
    spectrum: Tensor
    first: Tensor
    second: Tensor
    pixels: Tensor

    def totals(self) -> list[ChannelSums]:
        """Return the sums over all images, then the sums with each block left out."""
        sums = {name: rows.sum(0) for name, rows in vars(self).items()}
        left_out = [
            ChannelSums(**{name: sums[name] - rows[block] for name, rows in vars(self).items()})
            for block in range(NUM_BLOCKS)
        ]
        return [ChannelSums(**sums), *left_out]


def channel_sums(images: ImageSet) -> ChannelSums:
    """Return the sums of a set of images, whose values are scaled to 0 to 255."""
    channels, height, width = images.shape
    rows = np.fft.fftfreq(height)[:, None] * height
    columns = np.fft.fftfreq(width)[None] * width
    radius = torch.from_numpy(np.hypot(rows, columns).round().astype(np.int64)).flatten()
    rings, block = min(height, width) // 2 + 1, block_of_each(images.num_samples)
    counts = torch.zeros(NUM_BLOCKS, channels, _BINS, dtype=torch.float64)
    spectrum = torch.zeros(NUM_BLOCKS, channels, int(radius.max()) + 1, dtype=torch.float64)
    first = torch.zeros(NUM_BLOCKS, channels, dtype=torch.float64)
    second = torch.zeros(NUM_BLOCKS, channels, channels, dtype=torch.float64)
    for start in range(0, images.num_samples, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, images.num_samples))
        x, own = images.gather(places).double() / 255, block[places]  # [n, C, H, W]
        bins = (x * _BINS).long().clamp(0, _BINS - 1).flatten(2)
        of_image = torch.zeros(len(x), channels, _BINS, dtype=torch.float64)
        counts.index_add_(0, own, of_image.scatter_add_(2, bins, torch.ones_like(x).flatten(2)))
        power = torch.fft.fft2(x - x.mean((2, 3), keepdim=True)).abs().square().flatten(2)
        by_ring = torch.zeros(len(x), channels, spectrum.shape[2], dtype=torch.float64).index_add_(2, radius, power)
        spectrum.index_add_(0, own, by_ring)
        flat = x.flatten(2)
        first.index_add_(0, own, flat.sum(2))
        second.index_add_(0, own, flat @ flat.mT)
    pixels = torch.bincount(block, minlength=NUM_BLOCKS).double() * height * width
    return ChannelSums(counts, spectrum[:, :, 1:rings], first, second, pixels)


def intensity_distance(a: ChannelSums, b: ChannelSums) -> Tensor:
    """Return for each channel the 1-Wasserstein distance between the distributions of values, as a share of the range,
    [C]: the area between their cumulative distributions (Vallender 1974)."""
    first, second = (sums.counts.cumsum(1) / sums.counts.sum(1, keepdim=True) for sums in (a, b))
    return (first - second).abs().sum(1) / _BINS


def spectrum_distance(a: ChannelSums, b: ChannelSums) -> Tensor:
    """Return for each channel the root mean square difference of the radial power spectra in decibels, [C]."""
    first, second = (10 * torch.log10(sums.spectrum / sums.pixels + _LEAST_POWER) for sums in (a, b))
    return (first - second).square().mean(1).sqrt()


def correlation_distance(a: ChannelSums, b: ChannelSums) -> Tensor:
    """Return for each channel the root mean square difference of its correlations with the others, [C]."""
    first, second = (_correlations(sums) for sums in (a, b))
    return (first - second).square().sum(1).div(len(first) - 1).sqrt()


def _correlations(sums: ChannelSums) -> Tensor:
    mean = sums.first / sums.pixels
    covariance = sums.second / sums.pixels - mean[:, None] * mean[None]
    deviation = covariance.diagonal().clamp(min=_LEAST_POWER).sqrt()
    return covariance / (deviation[:, None] * deviation[None])


DISTANCES = {
    "channel_intensity": intensity_distance,
    "channel_spectrum": spectrum_distance,
    "channel_correlation": correlation_distance,
}


def evaluate_channels(
    samples: ImageSet, real: ImageSet, other: ImageSet, names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Return entries of metrics.json by name, each the mean over the channels, and the values of each channel by name.

    other: real images that are not part of `real`, whose distance is the floor, if there are any. Correlations need two
    channels.
    """
    sums, reference = channel_sums(samples).totals(), channel_sums(real).totals()
    baseline = channel_sums(other).totals()[0] if other.num_samples else None
    few = too_few(min(samples.num_samples, real.num_samples))
    entries: dict[str, Any] = {}
    by_channel: dict[str, dict[str, float]] = {name: {} for name in names}
    for metric, distance in DISTANCES.items():
        if metric == "channel_correlation" and len(names) == 1:
            continue
        values = distance(sums[0], reference[0])
        for name, value in zip(names, values.tolist(), strict=True):
            by_channel[name][metric] = value
        estimate = Estimate(float(values.mean()), samples.num_samples, note=few)
        if not few:
            left_out = [float(distance(some, reference[0]).mean()) for some in sums[1:]]
            without_real = [float(distance(sums[0], some).mean()) for some in reference[1:]]
            estimate = jackknife(estimate.value, left_out, estimate.n, low=0, reference_left_out=without_real)
        entry = estimate.as_dict()
        if baseline is not None:
            entry |= {"floor": float(distance(baseline, reference[0]).mean()), "floor_n": other.num_samples}
        entries[metric] = entry
    return entries, by_channel
