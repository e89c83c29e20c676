"""Kernel distance, precision and recall, scores, two-sample test: constructed sets, intervals by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.metrics.compute import _subset
from image_diffusion.metrics.distances.class_metrics import (
    agreement,
    class_frechet,
    confusion,
    inception_score,
    inception_score_estimate,
    missing_classes,
    two_sample_test,
)
from image_diffusion.metrics.distances.jackknife import jackknife
from image_diffusion.metrics.distances.moments import block_of_each
from image_diffusion.metrics.distances.precision_recall import manifold_estimates
from image_diffusion.metrics.distances.set_distances import _directions, kernel_distance, monge_distance


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_set_compared_with_itself_has_full_precision_and_recall():
    x = randn(150, 6)
    found = manifold_estimates(x, x)
    assert [found[name].value for name in ("precision", "recall", "coverage")] == [1, 1, 1]
    inside = found["density"].value * 3 * 150
    assert math.isclose(inside, round(inside), rel_tol=1e-13), "a whole number of samples, counted in float64"
    assert found["density"].value == pytest.approx(4 / 3, rel=0.05)  # itself and three neighbours on average, by k = 3


def test_distant_sets_have_zero_precision_and_recall():
    found = manifold_estimates(randn(120, 6) + 100, randn(130, 6, seed=1))
    assert [found[name].value for name in ("precision", "recall", "density", "coverage")] == [0, 0, 0, 0]


def test_samples_of_one_of_two_modes_have_half_recall():
    real = torch.cat([randn(150, 4, seed=1), randn(150, 4, seed=2) + 50])
    found = manifold_estimates(randn(200, 4, seed=3), real)
    assert found["precision"].value > 0.85
    assert 0.4 < found["recall"].value < 0.5 and found["coverage"].value < 0.5


def test_copies_of_one_image_recall_only_that_image():
    real = randn(100, 4)
    found = manifold_estimates(real[7].expand(100, 4), real)
    assert found["precision"].value == 1 and found["recall"].value == 0.01


@pytest.mark.parametrize(("copied", "new"), [(200, 0), (150, 150), (20, 0)])
def test_copies_on_the_boundary_of_a_ball_are_inside(copied: int, new: int):
    """A copy of the k-th neighbour has the same distance: computed here by differences, which are exactly equal."""
    real = randn(300, 64)
    samples = torch.cat([real[:copied], randn(new, 64, seed=1)])

    def squared(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([(row - b.double()).square().sum(1) for row in a.double()])

    distances, k = squared(real, samples), 3
    radii, own = (squared(each, each).sort(1).values[:, k] for each in (real, samples))
    inside = distances <= radii[:, None]
    found = manifold_estimates(samples, real, k)
    assert found["density"].value == pytest.approx(inside.double().sum(0).mean().item() / k, abs=1e-12)
    assert found["coverage"].value == pytest.approx(inside.any(1).double().mean().item(), abs=1e-12)
    assert found["precision"].value == pytest.approx(inside.any(0).double().mean().item(), abs=1e-12)
    assert found["recall"].value == pytest.approx((distances <= own).any(1).double().mean().item(), abs=1e-12)


def test_score_of_too_few_samples_has_a_note_and_no_interval():
    few = inception_score_estimate(randn(39, 4))
    assert few.interval is None and "39 samples are fewer than 100" in few.note


def test_manifold_intervals_match_leaving_blocks_out():
    x, y, block = randn(110, 3), randn(90, 3, seed=5) * 1.2, block_of_each(110)
    found = manifold_estimates(x, y)
    for name in ("precision", "recall", "density", "coverage"):
        without = [_plain(x[block != b], y)[name] for b in range(20)]
        centre = "value" if name in ("recall", "coverage") else "debiased"
        expected = jackknife(_plain(x, y)[name], without, 110, 0, math.inf if name == "density" else 1, centre)
        assert found[name].value == pytest.approx(expected.value)
        assert found[name].debiased == pytest.approx(expected.debiased)
        assert found[name].interval == pytest.approx(expected.interval)


def _plain(x: Tensor, y: Tensor, k: int = 3) -> dict[str, float]:
    def radii(points: Tensor) -> Tensor:
        return torch.cdist(points, points).sort(dim=1).values[:, k]

    distances = torch.cdist(x.double(), y.double())
    inside = distances <= radii(y.double())
    return {
        "precision": float(inside.any(1).double().mean()),
        "recall": float((distances <= radii(x.double()).unsqueeze(1)).any(0).double().mean()),
        "density": float(inside.sum(1).double().mean() / k),
        "coverage": float(inside.any(0).double().mean()),
    }


def test_kernel_distance_interval_matches_leaving_blocks_out():
    x, y = randn(120, 5), randn(80, 5, seed=1) + 0.2
    block, of_reference = block_of_each(120), block_of_each(80)
    found = kernel_distance(x, y)
    without = [kernel_distance(x[block != b], y).value for b in range(20)]
    without_reference = [kernel_distance(x, y[of_reference != b]).value for b in range(20)]
    expected = jackknife(found.value, without, 120, centre="value", reference_left_out=without_reference)
    assert found.debiased == pytest.approx(expected.debiased)
    assert found.interval == pytest.approx(expected.interval)


def test_kernel_distance_is_unbiased():
    values = [kernel_distance(randn(60, 4, seed=s), randn(60, 4, seed=s + 1000)).value for s in range(80)]
    assert abs(np.mean(values)) < 3 * np.std(values) / math.sqrt(80)
    assert min(values) < 0 < max(values)


def test_monge_distance_of_shifted_and_equal_sets():
    x, shift = randn(300, 6), torch.tensor([3.0, 0, -1, 0, 2, 0], dtype=torch.float64)
    along = (_directions(6) @ shift).square().mean()
    assert monge_distance(x, x + shift).value == pytest.approx(3 * 6 * float(along), rel=1e-6)
    assert float(6 * along) == pytest.approx(float(shift.square().sum()), rel=0.05), "that of all directions"
    assert monge_distance(x, x.repeat(2, 1)).value == pytest.approx(0, abs=1e-9), "sizes may differ"
    with pytest.raises(ValueError, match="at least 2 samples on each side; got 300 and 1"):
        monge_distance(x, x[:1])


def test_monge_distance_matches_its_paper_for_equal_sizes():
    x, y = randn(150, 5, seed=1).double(), randn(150, 5, seed=2).double() * 2
    sides = ((each @ _directions(5).T).sort(dim=0).values for each in (x, y))
    first, second = sides
    expected = 3 * 5 * (first - second).square().mean(dim=0).mean()
    assert monge_distance(x, y).value == pytest.approx(float(expected), rel=1e-12)


def test_monge_distance_interval_covers_the_true_value():
    reference = randn(200, 4, seed=1) + 0.5
    truth = monge_distance(randn(20_000, 4, seed=2), reference).value
    found = [monge_distance(randn(200, 4, seed=10 + s), reference).interval for s in range(60)]
    assert 0.9 <= np.mean([low <= truth <= high for low, high in found]) <= 1


def test_inception_score_of_uniform_and_one_hot_predictions():
    assert inception_score(torch.full((50, 7), 1 / 7)) == pytest.approx(1)
    one_hot = torch.eye(7).repeat(10, 1)
    assert inception_score(one_hot) == pytest.approx(7)
    assert inception_score_estimate(one_hot * 1000).value == pytest.approx(7)


def test_inception_score_interval_matches_leaving_blocks_out():
    logits, block = randn(200, 6) * 2, block_of_each(200)
    found = inception_score_estimate(logits)
    probabilities = logits.double().softmax(1)
    expected = jackknife(
        inception_score(probabilities), [inception_score(probabilities[block != b]) for b in range(20)], 200, 1, 6
    )
    assert found.interval == pytest.approx(expected.interval)
    assert found.debiased == pytest.approx(expected.debiased)


def test_two_sample_test_interval_covers_chance():
    covered = 0
    for seed in range(60):
        interval = two_sample_test(randn(200, 16, seed=2 * seed), randn(200, 16, seed=2 * seed + 1)).interval
        assert interval is not None
        covered += interval[0] <= 0.5 <= interval[1]
    assert covered >= 56, covered


def test_two_sample_test_separates_only_different_sets():
    same = two_sample_test(randn(400, 6, seed=2), randn(500, 6, seed=3))
    assert same.interval[0] < 0.5 < same.interval[1]
    assert two_sample_test(randn(400, 6) + 3, randn(400, 6, seed=1)).value > 0.95


def test_two_sample_test_of_odd_sizes_is_not_below_chance():
    """In halves of unequal shares, the larger class of the fitted half is the smaller class of the tested half."""
    values = [two_sample_test(randn(9, 4, seed=2 * i), randn(9, 4, seed=2 * i + 1)).value for i in range(200)]
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)
    assert two_sample_test(randn(9, 4), randn(12, 4, seed=1)).n == 16


def test_agreement_confusion_and_missing_classes():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    recognised = torch.tensor([0, 0, 0, 1, 0, 0])
    assert agreement(recognised, labels).value == pytest.approx(0.5)
    every = agreement(torch.zeros(100), torch.zeros(100)).interval  # Wilson's; a jackknife's has no width
    assert every == pytest.approx((100 / (100 + 1.96**2), 1), abs=1e-4)
    assert confusion(recognised, labels, 3).tolist() == [[2, 0, 0], [1, 1, 0], [2, 0, 0]]
    missing = missing_classes(recognised, labels, ["cat", "dog", "emu"])
    assert missing.value == 1 and missing.note == "emu"


def test_class_frechet_detects_swapped_labels():
    real, made = (
        torch.cat([randn(300, 3), randn(300, 3, seed=1) + 4]),
        torch.cat([randn(300, 3, seed=2), randn(300, 3, seed=3) + 4]),
    )
    labels = torch.arange(2).repeat_interleave(300)
    right = class_frechet(made, labels, real, labels)
    wrong = class_frechet(made, 1 - labels, real, labels)
    assert right.interval[1] < 0.5 < 40 < wrong.interval[0]
    few = class_frechet(made[::100], labels[::100], real, labels)
    assert few.interval is None and "biased" in few.note


def test_too_few_samples_are_rejected():
    with pytest.raises(ValueError, match="k = 3 need more than 3 samples; got 3"):
        manifold_estimates(randn(3, 4), randn(50, 4))
    with pytest.raises(ValueError, match="more than 3 reference images; got 2"):
        manifold_estimates(randn(50, 4), randn(2, 4))
    with pytest.raises(ValueError, match="at least 2 samples on each side; got 1 and 50"):
        kernel_distance(randn(1, 4), randn(50, 4))
    with pytest.raises(ValueError, match="at least 4 samples"):
        two_sample_test(randn(2, 4), randn(50, 4))


def test_subsets_of_rows_are_deterministic() -> None:
    rows = torch.arange(100.0).unsqueeze(1)
    assert _subset(rows, 100) is rows
    few = _subset(rows, 7).flatten()
    assert len(few) == 7 and (few.diff() > 0).all() and few.equal(_subset(rows, 7).flatten())
    assert not few.equal(rows[:7].flatten())
