"""Moments, the Fréchet distance and its interval, against closed forms and simulation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import jackknife, mean_estimate
from image_diffusion.metrics.distances.moments import Gaussian, Moments, block_moments, block_of_each, merged
from image_diffusion.metrics.distances.set_distances import frechet_distance, frechet_estimate, frechet_infinity


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def spd(dimension: int, seed: int, rank: int | None = None) -> Tensor:
    half = randn(dimension, rank or 2 * dimension, seed=seed)
    return half @ half.T / half.shape[1]


def test_frechet_distance_of_commuting_gaussians():
    basis = torch.linalg.qr(randn(16, 16)).Q
    a, b = randn(16, seed=1).abs() + 0.1, randn(16, seed=2).abs() + 0.1
    shift = randn(16, seed=3)
    first = Gaussian(torch.zeros(16, dtype=torch.float64), basis @ torch.diag(a) @ basis.T)
    second = Gaussian(shift, basis @ torch.diag(b) @ basis.T)
    expected = float(shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("rank", [None, 9, 3])
def test_frechet_distance_of_non_commuting_gaussians(rank: int | None):
    # S2 = T S1 T with T positive definite: tr (S1 S2)^½ = tr(T S1), without any root; also when S1 is singular.
    S1, T = spd(24, 4, rank), spd(24, 5)
    zero = torch.zeros(24, dtype=torch.float64)
    expected = float(S1.trace() + (T @ S1 @ T).trace() - 2 * (T @ S1).trace())
    for first, second in [(S1, T @ S1 @ T), (T @ S1 @ T, S1)]:
        assert frechet_distance(Gaussian(zero, first), Gaussian(zero, second)) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_with_fewer_samples_than_dimensions_and_unequal_ranks():
    # The features' own cross-Gram matrix gives the trace of the root exactly: its singular values, N1 x N2.
    x, y = randn(20, 64, seed=6), randn(35, 64, seed=7) * 2
    first, second = Moments.from_features(x), Moments.from_features(y)
    cross = (x - x.mean(0)) @ (y - y.mean(0)).T / math.sqrt(19 * 34)
    a, b = first.gaussian, second.gaussian
    expected = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    expected = float(expected - 2 * torch.linalg.svdvals(cross).sum())
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-11)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-10)


def test_frechet_distance_to_constant_features():
    spread, point = (
        Moments.from_features(randn(50, 8, seed=8)).gaussian,
        Moments.from_features(torch.ones(50, 8)).gaussian,
    )
    expected = float((spread.mean - 1).square().sum() + spread.covariance.trace())
    assert frechet_distance(spread, point) == frechet_distance(point, spread) == pytest.approx(expected)


def test_frechet_distance_invariances():
    x, y = randn(300, 10, seed=8), randn(200, 10, seed=9) + 0.3
    distance = frechet_distance(Moments.from_features(x).gaussian, Moments.from_features(y).gaussian)
    turned = torch.linalg.qr(randn(10, 10)).Q
    for a, b, factor in [(y, x, 1), (x @ turned + 5, y @ turned + 5, 1), (3 * x, 3 * y, 9), (x.flip(0), y, 1)]:
        assert frechet_distance(Moments.from_features(a).gaussian, Moments.from_features(b).gaussian) == pytest.approx(
            factor * distance, rel=1e-10
        )


def test_small_distance_between_ill_conditioned_gaussians_is_accurate():
    scale = torch.logspace(0, -10, 40, dtype=torch.float64)
    zero = torch.zeros(40, dtype=torch.float64)
    first, second = torch.diag(scale), torch.diag(scale * 1.001**2)
    expected = float(scale.sum()) * 0.001**2
    assert frechet_distance(Gaussian(zero, first), Gaussian(zero, second)) == pytest.approx(expected, rel=1e-8)


def test_block_moments_match_leaving_one_block_out():
    features = (randn(211, 6, seed=10) + 100).float()
    reference = Moments.from_features(randn(100, 6, seed=11) + 100).gaussian
    estimate = frechet_estimate(block_moments(features), reference)
    assert estimate.value == pytest.approx(
        frechet_distance(Moments.from_features(features).gaussian, reference), rel=1e-10
    )
    block = block_of_each(211)
    left_out = [frechet_distance(Moments.from_features(features[block != b]).gaussian, reference) for b in range(20)]
    expected = jackknife(estimate.value, left_out, 211, low=0.0)
    assert estimate.debiased == pytest.approx(expected.debiased, rel=1e-9)
    assert estimate.interval == pytest.approx(expected.interval, rel=1e-9)


def test_moments_merge_and_subtract_at_a_large_offset():
    features = randn(500, 5, seed=12) + 1e6
    parts = [Moments.from_features(part) for part in features.split([1, 99, 150, 250])]
    whole = merged(parts)
    torch.testing.assert_close(whole.gaussian.covariance, features.T.cov(), rtol=1e-9, atol=1e-9)
    left = whole.without(parts[2])
    expected = torch.cat([features[:100], features[250:]])
    assert left.count == 350
    torch.testing.assert_close(left.gaussian.covariance, expected.T.cov(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(left.mean, expected.mean(0), rtol=1e-14, atol=0)


def test_blocks_have_equal_sizes_and_do_not_follow_class_order():
    assigned = block_of_each(2000)
    assert torch.bincount(assigned).tolist() == [100] * 20
    per_class = torch.stack([torch.bincount(assigned[c::10], minlength=20) for c in range(10)])
    assert per_class.min() > 0


@pytest.mark.parametrize("samples_per_dimension", [5, 12])
@pytest.mark.parametrize(("widest", "shift"), [(2.5, 0.0), (1.0, 0.26)])
def test_jackknife_interval_covers_and_debiasing_removes_the_bias(
    samples_per_dimension: int, widest: float, shift: float
):
    D, repeats = 12, 300
    N = samples_per_dimension * D
    scale = torch.linspace(1 / widest, widest, D, dtype=torch.float64)
    reference = Gaussian(torch.zeros(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64))
    truth = float((scale - 1).square().sum()) + D * shift**2
    draws = [randn(N, D, seed=1000 * N + repeat) * scale + shift for repeat in range(repeats)]
    estimates = [frechet_estimate(block_moments(draw), reference) for draw in draws]
    covered = sum(e.interval[0] <= truth <= e.interval[1] for e in estimates) / repeats
    assert 0.90 <= covered <= 0.98
    bias = sum(e.value for e in estimates) / repeats - truth
    left = sum(e.debiased for e in estimates) / repeats - truth
    assert bias > 0.05 * truth and abs(left) < bias / 5


def test_too_few_samples_give_no_interval_and_a_biased_note():
    reference = Moments.from_features(randn(500, 8)).gaussian
    few = frechet_estimate(block_moments(randn(39, 8)), reference)
    assert few.interval is None and few.debiased is None and "biased" in few.note and "39" in few.note
    assert frechet_estimate(block_moments(randn(40, 8)), reference).interval is not None


def test_debiased_distance_is_not_negative():
    """The distance of a set to itself is zero and grows if blocks are left out, so debiasing would make it negative."""
    features = randn(200, 4)
    found = frechet_estimate(block_moments(features), Moments.from_features(features).gaussian)
    assert found.debiased == 0 and found.interval is not None and found.interval[0] == 0


def test_frechet_infinity_removes_the_bias():
    D = 6
    reference = Gaussian(torch.zeros(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64))
    values = [frechet_infinity(block_moments(randn(300, D, seed=s)), reference).value for s in range(60)]
    biased = [frechet_estimate(block_moments(randn(300, D, seed=s)), reference).value for s in range(60)]
    assert abs(sum(values)) < sum(biased) / 4
    one = frechet_infinity(block_moments(randn(300, D)), reference)
    assert one.interval is not None and one.debiased == one.value  # the value is already extrapolated


def test_jackknife_of_a_mean_matches_the_textbook_interval():
    each = randn(400, seed=3)
    estimate = mean_estimate(each)
    assert estimate.value == pytest.approx(float(each.mean())) and estimate.debiased == pytest.approx(estimate.value)
    half = (estimate.interval[1] - estimate.interval[0]) / 2
    assert half == pytest.approx(2.09 * float(each.std()) / 20, rel=0.35)
    assert mean_estimate(each[:50]).interval is None


def test_jackknife_is_clipped_to_the_range_of_the_statistic():
    estimate = jackknife(0.99, [0.95, 1.0, 1.0, 1.0], 100, low=0, high=1)
    assert estimate.interval[1] == 1 and 0 <= estimate.interval[0] <= estimate.debiased <= 1


def test_mistakes_are_told():
    good = randn(30, 4)
    with pytest.raises(ValueError, match=r"1 of 30 samples are not finite \(first: row 7\)"):
        Moments.from_features(good.index_fill(0, torch.tensor([7]), math.nan))
    with pytest.raises(ValueError, match="4 dimensions but the reference has 5"):
        frechet_distance(Moments.from_features(good).gaussian, Moments.from_features(randn(30, 5)).gaussian)
    with pytest.raises(ValueError, match="at least 2 samples"):
        _ = Moments.from_features(good[:1]).gaussian
