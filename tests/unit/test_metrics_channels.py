"""Metrics of the channels of arrays: their sensitivity, values against numpy and closed forms, and intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from image_diffusion.core.levels import Levels
from image_diffusion.metrics.images.channels import channel_sums, evaluate_channels
from image_diffusion.metrics.samples import Samples

LEVELS = Levels(dtype="uint16", channels=("a", "b"), low=(0, 0), high=(4095, 4095))


def correlated(count: int, seed: int, share: float = 0.8, mean: float = 2000, side: int = 16) -> NDArray[Any]:
    """Return uint16 noise [count, side, side, 2] with partly shared channels."""
    draw = np.random.default_rng(seed)
    common, own = draw.normal(size=(count, side, side, 1)), draw.normal(size=(count, side, side, 2))
    mixed = np.sqrt(share) * common + np.sqrt(1 - share) * own
    return (mean + 300 * mixed).round().clip(0, 4095).astype(np.uint16)


def of(numbers: NDArray[Any]) -> Samples:
    return Samples(numbers, None, [], levels=LEVELS)


def measured(samples: NDArray[Any], real: NDArray[Any], other: NDArray[Any]) -> dict[str, Any]:
    return evaluate_channels(of(samples), of(real), of(other), LEVELS.channels)[0]


def test_intensity_distance_matches_scipy() -> None:
    from scipy.stats import wasserstein_distance  # slow to import

    a, b = correlated(60, 0), correlated(60, 1, mean=2300)
    _, by_channel = evaluate_channels(of(a), of(b), of(b[:0]), LEVELS.channels)
    for channel, name in enumerate(LEVELS.channels):
        expected = wasserstein_distance(a[..., channel].ravel(), b[..., channel].ravel()) / 4095
        assert by_channel[name]["channel_intensity"] == pytest.approx(expected, abs=1 / 256)


def test_correlation_distance_matches_numpy() -> None:
    a, b = correlated(60, 0, share=0.8), correlated(60, 1, share=0.2)
    first, second = (np.corrcoef(numbers.reshape(-1, 2).T.astype(float))[0, 1] for numbers in (a, b))
    assert measured(a, b, b[:0])["channel_correlation"]["value"] == pytest.approx(abs(first - second), abs=1e-4)


def test_spectrum_detects_blur_that_intensities_do_not() -> None:
    a = correlated(120, 0)
    mixed = np.random.default_rng(0).permuted(a.reshape(120, -1, 2), axis=1).reshape(a.shape)
    smooth = np.sort(a.reshape(120, -1, 2), axis=1).reshape(a.shape)
    entries = measured(smooth, mixed, a)
    assert entries["channel_intensity"]["value"] < 1e-9
    assert entries["channel_spectrum"]["value"] > 3
    assert entries["channel_spectrum"]["interval"][0] > entries["channel_spectrum"]["floor"]


def test_power_spectrum_of_white_noise_is_its_variance() -> None:
    sums = channel_sums(of(correlated(200, 3))).totals()[0]
    draws = np.hypot(*np.meshgrid(np.fft.fftfreq(16) * 16, np.fft.fftfreq(16) * 16)).round().astype(int)
    in_ring = np.bincount(draws.ravel())[1:9]
    power = (sums.spectrum / sums.pixels).numpy() / in_ring
    assert np.allclose(power, (300 / 4095) ** 2, rtol=0.1)


@pytest.mark.parametrize("metric", ["channel_intensity", "channel_spectrum", "channel_correlation"])
def test_real_images_score_near_the_floor_and_others_above_it(metric: str) -> None:
    real, same, other = correlated(300, 0), correlated(300, 1), correlated(300, 2)
    entry = measured(same, real, other)[metric]
    assert entry["interval"][0] <= entry["debiased"] <= entry["interval"][1]
    assert entry["value"] < 4 * entry["floor"]
    assert entry["floor_n"] == 300
    shifted = measured(correlated(300, 1, share=0.3, mean=2200, side=16) // 2, real, other)[metric]
    assert shifted["interval"][0] > entry["interval"][1]


def test_few_images_have_no_interval() -> None:
    entry = measured(correlated(20, 0), correlated(300, 1), correlated(300, 2)[:0])["channel_intensity"]
    assert entry["interval"] is None
    assert entry["note"]
    assert entry["floor"] is None


def test_one_channel_has_no_correlation() -> None:
    levels = Levels(dtype="uint16", channels=("a",), low=(0,), high=(4095,))
    sets = [Samples(correlated(60, seed)[..., :1], None, [], levels=levels) for seed in (0, 1)]
    entries, _ = evaluate_channels(sets[0], sets[1], sets[1], ("a",))
    assert entries.keys() == {"channel_intensity", "channel_spectrum"}
