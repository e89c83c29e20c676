"""Importance sampling of timesteps: what it draws, what it remembers, and that processes agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossSecondMoment, LossSecondMomentSampler
from image_diffusion.process import Discrete


def streams(count: int, epoch: int = 0) -> Streams:
    return Streams(seed=5, epoch=torch.full((count,), epoch), sample=torch.arange(count))


def remember(sampler: LossSecondMomentSampler, t: list[int], loss: list[float]) -> None:
    sampler.record(torch.tensor(t, dtype=torch.int64), torch.tensor(loss, dtype=torch.float32, requires_grad=True))


def test_timesteps_of_large_loss_are_drawn_more_often_and_weigh_less() -> None:
    sampler = LossSecondMomentSampler(4, history=2, uniform_probability=0.01)
    remember(sampler, [0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 2, 2, 4, 4])
    _, before = sampler.draw(streams(8))
    assert torch.equal(before, torch.ones(8))  # nothing recorded counts before the step has ended
    sampler.end_step()
    p = sampler.probabilities()
    torch.testing.assert_close(p, 0.99 * torch.tensor([1, 1, 2, 4]).double() / 8 + 0.01 / 4)
    t, weight = sampler.draw(streams(40000))
    torch.testing.assert_close(t.bincount(minlength=4) / 40000, p.float(), rtol=0, atol=0.01)
    torch.testing.assert_close(weight, (1 / (4 * p[t])).float())
    assert weight.mean().item() == pytest.approx(1, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 10, width=32)), max_size=40), st.integers(1, 7))
def test_only_the_last_losses_count_however_they_arrive(pairs: list[tuple[int, float]], size: int) -> None:
    sampler = LossSecondMomentSampler(4, history=3)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        remember(sampler, [t for t, _ in part], [loss for _, loss in part])
        sampler.end_step()
    state = sampler.state_dict()
    for t in range(4):
        losses = [loss for each, loss in pairs if each == t]
        assert state["counts"][t] == len(losses)
        assert sorted(state["losses"][t].tolist()) == sorted(losses[-3:] + [0.0] * (3 - len(losses[-3:])))


def test_losses_of_validation_do_not_count() -> None:
    sampler = LossSecondMomentSampler(2, history=1)
    sampler.record(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    sampler.end_step()
    assert sampler.state_dict()["counts"].tolist() == [0, 0]


def test_a_sampler_continues_from_its_state() -> None:
    first = LossSecondMomentSampler(3, history=2)
    remember(first, [0, 1, 2, 0, 1, 2, 2], [1, 2, 3, 4, 5, 6, 7])
    first.end_step()
    second = LossSecondMomentSampler(3, history=2)
    second.load_state_dict(first.state_dict())
    for sampler in (first, second):
        remember(sampler, [0, 2], [9, 8])
        sampler.end_step()
    assert torch.equal(first.probabilities(), second.probabilities())
    assert torch.equal(first.draw(streams(50))[0], second.draw(streams(50))[0])


def test_a_state_of_another_objective_is_refused() -> None:
    spec, process = DataSpec(channels=1, resolution=2), Discrete(num_timesteps=20).build()
    importance = Denoising(timestep_sampling=LossSecondMoment()).build(process, spec)
    uniform = Denoising().build(process, spec)
    assert uniform.state_dict() == {}
    uniform.load_state_dict({})
    with pytest.raises(ValueError, match="has no state, but the checkpoint has losses, counts"):
        uniform.load_state_dict(importance.state_dict())
    with pytest.raises(ValueError, match="Resume with the objective the checkpoint was written with"):
        importance.load_state_dict({})
    other = Denoising(timestep_sampling=LossSecondMoment(history=3)).build(process, spec)
    with pytest.raises(ValueError, match="timestep history"):
        importance.load_state_dict(other.state_dict())


def worker(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    sampler = LossSecondMomentSampler(5, history=2)
    for step in range(4):
        share = slice(0, 4) if rank == 0 else slice(4, 7)  # shares of different length
        t, loss = draws(step)
        for part in (slice(0, 2), slice(2, None)):  # in micro-batches
            remember(sampler, t[share][part], loss[share][part])
        sampler.end_step()
    torch.save(sampler.state_dict(), folder / f"{rank}.pt")
    dist.destroy_process_group()


def draws(step: int) -> tuple[list[int], list[float]]:
    return [(step + 2 * i) % 5 for i in range(7)], [0.5 + step + i for i in range(7)]


def test_processes_hold_the_history_that_one_process_would(tmp_path: Path) -> None:
    """D-17: the original gathers shares of unequal length without padding, and loses its history on resume."""
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    alone = LossSecondMomentSampler(5, history=2)
    for step in range(4):
        remember(alone, *draws(step))
        alone.end_step()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert {name: value.tolist() for name, value in state.items()} == {
            name: value.tolist() for name, value in alone.state_dict().items()
        }


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
