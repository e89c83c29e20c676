"""Every sample once an epoch, in one order, whatever reads it: 10,000 generated configurations of pure arithmetic."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.data.order import at_positions, epoch_order, share


@settings(max_examples=10_000, deadline=None)
@given(
    num_samples=st.integers(1, 40),
    world_size=st.integers(1, 5),
    global_batch=st.integers(1, 30),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 2**63 - 1),
    interrupted_at=st.floats(0, 1),
    new_world_size=st.integers(1, 5),
)
def test_every_sample_comes_once_an_epoch_for_any_world_batch_and_interruption(
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
            parts.append(np.stack(at_positions(*mine, num_samples, seed)))
    seen = np.concatenate(parts, axis=1)
    for epoch in range(epochs):
        sample = seen[0, seen[1] == epoch]
        assert sorted(sample) == list(range(num_samples))
    assert (seen == np.stack(at_positions(0, seen.shape[1], num_samples, seed))).all()


def test_the_order_of_an_epoch_never_changes() -> None:
    assert epoch_order(10, seed=0, epoch=0).tolist() == [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
    assert epoch_order(10, seed=0, epoch=1).tolist() != epoch_order(10, seed=0, epoch=0).tolist()
    assert epoch_order(10, seed=1, epoch=0).tolist() != epoch_order(10, seed=0, epoch=0).tolist()


def test_every_sample_is_equally_likely_at_every_place() -> None:
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
