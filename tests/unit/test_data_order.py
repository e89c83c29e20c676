"""Sample order: every sample once per epoch, in one order for any reader, by generated cases of pure arithmetic.

The hypothesis profile `full` (`make test-all`) generates 10,000 of them, `quick` 200: see tests/conftest.py.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.data.shards.order import Balanced, Shuffled, epoch_order, share


@pytest.mark.slow
@pytest.mark.smoke
@given(
    num_samples=st.integers(1, 40),
    world_size=st.integers(1, 5),
    global_batch=st.integers(1, 30),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 2**63 - 1),
    interrupted_at=st.floats(0, 1),
    new_world_size=st.integers(1, 5),
)
def test_each_sample_comes_once_per_epoch_for_any_world_batch_and_interruption(
    num_samples: int,
    world_size: int,
    global_batch: int,
    epochs: int,
    seed: int,
    interrupted_at: float,
    new_world_size: int,
) -> None:
    steps = -(-epochs * num_samples // global_batch)
    interruption = int(interrupted_at * steps)
    parts = []
    for step in range(steps):
        world = world_size if step < interruption else new_world_size
        start = step * global_batch
        for rank in range(world):
            mine = share(start, start + global_batch, rank, world)
            assert global_batch // world <= mine[1] - mine[0] <= -(-global_batch // world)
            parts.append(np.stack(Shuffled(num_samples, seed).at(*mine)))
    seen = np.concatenate(parts, axis=1)
    for epoch in range(epochs):
        sample = seen[0, seen[1] == epoch]
        assert sorted(sample) == list(range(num_samples))
    assert (seen == np.stack(Shuffled(num_samples, seed).at(0, seen.shape[1]))).all()


def test_the_order_of_an_epoch_never_changes() -> None:
    assert epoch_order(10, seed=0, epoch=0).tolist() == [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
    assert epoch_order(10, seed=0, epoch=1).tolist() != epoch_order(10, seed=0, epoch=0).tolist()
    assert epoch_order(10, seed=1, epoch=0).tolist() != epoch_order(10, seed=0, epoch=0).tolist()


def test_samples_are_uniform_at_every_position() -> None:
    n, epochs = 12, 6000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), epoch_order(n, seed=3, epoch=epoch)] += 1
    expected = epochs / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_squared - freedom) < 4 * np.sqrt(2 * freedom)


def test_neighbouring_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [epoch_order(2000, seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.12


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    rounds=st.integers(1, 30),
    seed=st.integers(0, 2**63 - 1),
    cuts=st.lists(st.integers(0, 180), max_size=5),
)
def test_balanced_classes_are_drawn_equally_and_repeat_samples_only_after_all_others(
    counts: list[int], rounds: int, seed: int, cuts: list[int]
) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    present = [label for label, count in enumerate(counts) if count]
    total = rounds * len(present)
    bounds = sorted({0, total, *(cut for cut in cuts if cut < total)})
    parts = [Balanced(labels, seed).at(*each) for each in pairwise(bounds)]  # each part follows an interruption
    sample, epoch = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert (np.stack(Balanced(labels, seed).at(0, total)) == np.stack([sample, epoch])).all()
    assert (np.sort(labels[sample].reshape(rounds, -1), axis=1) == present).all()
    for label in present:
        drawn = sample[labels[sample] == label]
        for number in range(0, rounds, counts[label]):
            pass_over = drawn[number : number + counts[label]]
            assert len(set(pass_over.tolist())) == len(pass_over)
            assert (epoch[labels[sample] == label][number : number + counts[label]] == number // counts[label]).all()


def test_balanced_classes_share_the_draws_of_a_long_tail() -> None:
    labels = np.repeat(np.arange(3), [900, 90, 10])
    sample, epoch = Balanced(labels, seed=1).at(0, 3 * 900)
    assert np.bincount(labels[sample]).tolist() == [900, 900, 900]
    assert set(Counter(sample[labels[sample] == 0].tolist()).values()) == {1}
    assert set(Counter(sample[labels[sample] == 1].tolist()).values()) == {10}
    assert set(Counter(sample[labels[sample] == 2].tolist()).values()) == {90}
    assert len({*zip(sample.tolist(), epoch.tolist(), strict=True)}) == 2700


def test_the_order_of_balanced_classes_never_changes() -> None:
    sample, epoch = Balanced(np.array([0, 0, 0, 1, 2, 2]), seed=0).at(0, 9)
    assert sample.tolist() == [3, 1, 5, 3, 0, 4, 3, 2, 5]
    assert epoch.tolist() == [0, 0, 0, 1, 0, 0, 2, 0, 1]
