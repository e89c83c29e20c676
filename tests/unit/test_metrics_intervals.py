"""Intervals of all metrics cover the estimate, and zero if both sets are of one distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from image_diffusion.metrics.compute import Reference, measure, measure_preview
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances import precision_recall, set_distances
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife
from image_diffusion.metrics.distances.set_distances import cmmd, frechet_between, kernel_distance, monge_distance
from image_diffusion.metrics.features.base import Detected

CLASSES = ["cat", "dog"]


def drawn(rng: np.random.Generator, count: int, shift: float) -> Tensor:
    return torch.from_numpy(rng.normal(0, [0.3, 1, 2], (count, 3)) + shift).float()


def seen(features: Tensor) -> Detected:
    """Output of a detector of two classes, which the first feature separates."""
    return Detected(features, torch.stack([-features[:, 0], features[:, 0]], dim=1), features[:, :2])


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["same", "part", "one distribution", "near", "far"]),
    n=st.integers(100, 160),
    m=st.integers(40, 200),
    knows_classes=st.booleans(),
)
def test_every_estimate_lies_in_its_interval(seed: int, kind: str, n: int, m: int, knows_classes: bool) -> None:
    rng = np.random.default_rng(seed)
    real = drawn(rng, n if kind == "same" else n + m, 0)
    shift = {"near": 0.2, "far": 30.0}.get(kind, 0.0)
    made = real[:n] if kind in ("same", "part") else drawn(rng, n, shift)
    labels = torch.arange(n) % 2
    reference = Reference.from_images(seen(real), torch.arange(len(real)) % 2)
    classes = CLASSES if knows_classes else []
    found = measure(seen(made), labels, reference, classes, EvaluateConfig(infinity=True, cmmd=True))
    assert {"fd", "spatial_fd", "fd_infinity", "kd", "mind", "cmmd", "precision", "recall", "density"} <= found.keys()
    for name, estimate in found.items():
        if estimate.interval is None:
            continue
        low, high = estimate.interval
        assert estimate.debiased is not None
        assert low <= estimate.debiased <= high, (name, estimate)
        assert low - 1e-9 <= estimate.value <= high + 1e-9 or "without bias" in estimate.note, (name, estimate)
        if name in ("kd", "cmmd", "mind") and kind in ("same", "part"):
            assert low <= 0 < high, (name, estimate)


def test_reference_computations_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    real, made = drawn(rng, 80, 0), [drawn(rng, count, 0.2) for count in (50, 60, 60)]
    configs = [
        EvaluateConfig(cmmd=True, two_sample=False, neighbours=k, neighbour_references=most)
        for k, most in ((3, 1000), (5, 1000), (3, 70))
    ]

    def estimates(references: list[Reference]) -> list[dict[str, Estimate]]:
        calls = [(seen(rows), references.pop(), config) for config in configs for rows in made]
        measured = [measure(rows, None, reference, [], config) for rows, reference, config in calls]
        previews = [measure_preview(rows, None, reference, c.neighbour_references) for rows, reference, c in calls]
        return measured + previews

    expected = estimates([Reference.from_images(seen(real), None) for _ in range(9)])
    pairs, radii, within, neighbour_radii = [], [], set_distances._within, precision_recall.neighbour_radii
    monkeypatch.setattr(
        set_distances, "_within", lambda *given: pairs.append((given[0], len(given[1]))) or within(*given)
    )
    monkeypatch.setattr(
        precision_recall, "neighbour_radii", lambda rows, k: radii.append((len(rows), k)) or neighbour_radii(rows, k)
    )
    assert repr(estimates([Reference.from_images(seen(real), None)] * 9)) == repr(expected)
    assert sorted(rows for kernel, rows in pairs if kernel is set_distances._cubic and rows > 60) == [70, 80]
    assert sorted(radii) == [(70, 3), (80, 3), (80, 5)]


@pytest.mark.parametrize(
    ("distance", "shares_images", "repeats"),
    [
        (kernel_distance, False, 100),
        (cmmd, False, 100),
        (monge_distance, False, 30),
        (kernel_distance, True, 30),
        (cmmd, True, 30),
        (monge_distance, True, 30),
        (frechet_between, True, 30),
    ],
)
def test_intervals_cover_zero_for_sets_of_one_distribution(
    distance: Callable[[Tensor, Tensor], Estimate], shares_images: bool, repeats: int
) -> None:
    rng, covered = np.random.default_rng(7), 0
    pool = drawn(rng, 2000, 0)
    for _ in range(repeats):
        order = torch.from_numpy(rng.permutation(len(pool)))
        real = pool[order[:300]]
        interval = distance(real[:150] if shares_images else pool[order[300:450]], real).interval
        assert interval is not None and interval[1] > interval[0]
        covered += interval[0] <= 0 <= interval[1]
    assert covered / repeats >= 0.9


def test_estimates_beyond_a_bound_have_the_interval_at_the_bound() -> None:
    left_out = [0.30, 0.31, 0.29, 0.30]
    beyond, on = jackknife(0.1, left_out, 100, low=0), jackknife(0.3, left_out, 100, low=0, centre="value")
    assert beyond.debiased == 0 and beyond.interval is not None and on.interval is not None
    assert beyond.interval == pytest.approx((0, on.interval[1] - 0.3))
    assert beyond.note == "the interval is of 0, without bias" and on.note == ""


def test_reference_bias_and_variance_are_added() -> None:
    one, other = [1.0, 1.2, 0.9, 1.1], [1.3, 1.0, 1.1, 1.2]
    both = jackknife(1.0, one, 100, reference_left_out=other)
    alone = [jackknife(1.0, each, 100) for each in (one, other)]
    reach = [(each.interval[1] - each.interval[0]) / 2 for each in (*alone, both) if each.interval is not None]
    assert reach[2] == pytest.approx(np.hypot(reach[0], reach[1]))
    assert both.debiased == pytest.approx(sum(each.debiased - 1 for each in alone if each.debiased is not None) + 1)


def test_too_few_reference_images_give_no_interval() -> None:
    for distance in (kernel_distance, monge_distance):
        found = distance(torch.randn(120, 3), torch.randn(39, 3))
        assert found.interval is None and "39 reference images are fewer than 40" in found.note
