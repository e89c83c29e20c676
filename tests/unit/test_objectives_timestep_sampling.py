"""Importance sampling of timesteps: its distribution, its loss history, and agreement of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Losses
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import ImportanceSampled, LossHistory, LossSecondMoment
from image_diffusion.process import Discrete
from image_diffusion.training.parallel.gradients import gather_losses, joined, shares
from image_diffusion.training.parallel.world import join


def objective_of(num_timesteps: int = 5, history: int = 2) -> ImportanceSampled:
    config = Denoising(timestep_sampling=LossSecondMoment(history=history))
    process = Discrete(num_timesteps=num_timesteps, schedule={"type": "cosine"}).build()
    objective = config.build(process, DataSpec(channels=1, resolution=2))
    assert isinstance(objective, ImportanceSampled)
    return objective


def batch_of(sample: Tensor, epoch: int = 0) -> Batch:
    x = torch.sin(sample.float()).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Batch(x, {}, Streams(seed=5, epoch=torch.full_like(sample, epoch), sample=sample))


def network(x: Tensor, t: Tensor) -> Tensor:
    return x * (1 + t.view(-1, 1, 1, 1))


def test_timesteps_of_large_loss_are_drawn_more_often_and_weigh_less() -> None:
    history = LossHistory(4, history=2, uniform_probability=0.01)
    assert torch.equal(history.importance_weights(torch.arange(4)), torch.ones(4))
    history.append(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.tensor([1.0, 1, 1, 1, 2, 2, 4, 4]))
    p = history.probabilities()
    torch.testing.assert_close(p, 0.99 * torch.tensor([1, 1, 2, 4]).double() / 8 + 0.01 / 4)
    t = history.draw(batch_of(torch.arange(40000)).streams)
    torch.testing.assert_close(t.bincount(minlength=4) / 40000, p.float(), rtol=0, atol=0.01)
    weight = history.importance_weights(t)
    torch.testing.assert_close(weight, (1 / (4 * p[t])).float())
    assert weight.mean().item() == pytest.approx(1, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 10, width=32)), max_size=40), st.integers(1, 7))
def test_history_keeps_the_last_losses_for_any_batch_size(pairs: list[tuple[int, float]], size: int) -> None:
    history = LossHistory(4, history=3)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        history.append(torch.tensor([t for t, _ in part]), torch.tensor([loss for _, loss in part]))
    state = history.state_dict()
    for t in range(4):
        losses = [loss for each, loss in pairs if each == t]
        assert state["counts"][t] == len(losses)
        assert sorted(state["losses"][t].tolist()) == sorted(losses[-3:] + [0.0] * (3 - len(losses[-3:])))


def test_history_holds_unweighted_losses() -> None:
    objective = objective_of()
    for step in range(12):
        batch = batch_of(torch.arange(8), epoch=step)
        losses = objective(network, batch)
        objective.memory.observe(losses)
    plain = Denoising().build(
        Discrete(num_timesteps=5, schedule={"type": "cosine"}).build(), DataSpec(channels=1, resolution=2)
    )
    t = (losses.time * 5).round().long()
    expected = plain.at_times(network, batch, t).loss
    state = objective.memory.state_dict()
    assert (state["counts"] > 2).all()
    last = state["losses"][t[-1], (state["counts"][t[-1]] - 1) % 2]
    assert last.item() == pytest.approx(expected[-1].item(), rel=1e-6)
    assert (losses.loss / expected).std() > 0.01


def test_importance_sampling_resumes_from_its_state() -> None:
    first, second = objective_of(), objective_of()
    for step in range(6):
        first.memory.observe(first(network, batch_of(torch.arange(8), epoch=step)))
    second.memory.load_state_dict(first.memory.state_dict())
    kept = {name: value.clone() for name, value in first.memory.state_dict().items()}
    for step in range(6, 9):
        batch = batch_of(torch.arange(8), epoch=step)
        results = [objective(network, batch) for objective in (first, second)]
        assert torch.equal(results[0].loss, results[1].loss)
        first.memory.observe(results[0])
        second.memory.observe(results[1])
    assert not torch.equal(kept["losses"], first.memory.state_dict()["losses"])


def test_history_shares_no_memory_with_its_loaded_state() -> None:
    history, state = LossHistory(4, history=2), {"losses": torch.ones(4, 2).double(), "counts": torch.ones(4).long()}
    history.load_state_dict(state)
    history.append(torch.tensor([1, 2]), torch.tensor([5.0, 5.0]))
    assert state["losses"].tolist() == [[1.0, 1.0]] * 4 and state["counts"].tolist() == [1, 1, 1, 1]


def test_history_moves_to_the_device_of_the_losses() -> None:
    history = LossHistory(4)
    history.append(torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, device="meta"))
    assert {value.device.type for value in history.state_dict().values()} == {"meta"}


def test_only_importance_sampling_has_a_history() -> None:
    """The training loop gathers losses only for objectives with a history."""
    process, spec = Discrete().build(), DataSpec(channels=1, resolution=2)
    assert objective_of().memory is not None
    assert Denoising().build(process, spec).memory is None


def test_state_of_another_objective_is_rejected() -> None:
    with pytest.raises(ValueError, match="Resume with the objective the checkpoint was written with"):
        objective_of().memory.load_state_dict({})
    with pytest.raises(ValueError, match="timestep history"):
        objective_of().memory.load_state_dict(objective_of(history=3).memory.state_dict())


def train(rank_samples: list[Tensor], gather: object, steps: int = 8) -> dict[str, Tensor]:
    """Return the state after some steps, each given to this process in these micro-batches."""
    objective = objective_of()
    for step in range(steps):
        losses = joined([objective(network, batch_of(part, epoch=step)) for part in rank_samples])
        objective.memory.observe(gather(losses))
    return objective.memory.state_dict()


def worker(folder: Path) -> None:
    with join(timeout_s=60) as world:
        sizes = shares(7, world)
        mine = torch.arange(7).split(sizes)[world.rank]
        state = train(list(mine.split(2)), lambda losses: gather_losses(losses, sizes, world))
        torch.save(state, folder / f"{world.rank}.pt")


@pytest.mark.slow
def test_distributed_history_equals_that_of_one_process(tmp_path: Path) -> None:
    """D-17: the original gathers shares of unequal length without padding, and loses its history on resume."""
    alone = train([torch.arange(7)], lambda losses: losses)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run([*launch, str(tmp_path)], check=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(state["counts"], alone["counts"])
        torch.testing.assert_close(state["losses"], alone["losses"], rtol=1e-6, atol=0)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))


def test_validation_samples_and_weights_timesteps_uniformly() -> None:
    objective, plain = (
        objective_of(),
        Denoising().build(
            Discrete(num_timesteps=5, schedule={"type": "cosine"}).build(), DataSpec(channels=1, resolution=2)
        ),
    )
    t = torch.arange(5).repeat_interleave(2)
    objective.memory.observe(Losses((1 + t).float(), {}, t.double() / 5))
    ids = torch.arange(64)
    assert not torch.equal(objective(network, batch_of(ids)).loss, plain(network, batch_of(ids)).loss)
    assert torch.equal(objective.uniform()(network, batch_of(ids)).loss, plain(network, batch_of(ids)).loss)
