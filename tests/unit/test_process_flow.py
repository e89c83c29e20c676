"""Continuous and flow processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.process.continuous import Continuous, CosineGamma, LinearGamma, SigmoidGamma
from image_diffusion.process.flow import Flow, LogitNormalTimes, UniformTimes
from image_diffusion.samplers.ode import Euler


def streams(count: int) -> Streams:
    return Streams(seed=3, epoch=torch.zeros(count, dtype=torch.int64), sample=torch.arange(count))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([CosineGamma, SigmoidGamma]), st.floats(0, 0.6), st.floats(0.2, 0.4), st.floats(0.3, 3))
def test_gamma_falls_from_one_to_its_minimum(kind: type[CosineGamma], start: float, span: float, tau: float) -> None:
    schedule = kind(start=start, end=start + span, tau=tau)
    gamma = schedule.gamma(torch.linspace(0, 1, 101, dtype=torch.float64))
    assert gamma[0] == pytest.approx(1) and gamma[-1] == pytest.approx(1e-9, abs=1e-12)
    assert (gamma.diff() < 0).all()


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_levels_have_the_signal_to_noise_ratio_of_the_schedule(scale: float) -> None:
    process = Continuous(schedule=LinearGamma(), scale=scale).build()
    t = torch.tensor([0.1, 0.5, 0.9])
    alpha, sigma = process.levels(t)
    torch.testing.assert_close(alpha**2 / sigma**2, scale**2 * (1 - t.double()) / t.double())
    assert process.levels(torch.tensor([0.0]))[1] == 0


def test_training_times_stay_away_from_the_clean_end() -> None:
    """D-35: at t = 0 there is no noise."""
    process = Continuous().build()
    t = process.draw(streams(20000))
    assert t.min() >= 1e-4 and t.max() < 1 and process.levels(t)[1].min() > 0
    assert t.mean().item() == pytest.approx(0.5, abs=0.01)
    assert process.fraction(torch.tensor([0.0, 1.0])).tolist() == [0, 1 - 2**-24]


def test_flow_times_follow_their_distribution() -> None:
    uniform = Flow(times=UniformTimes()).build().draw(streams(20000))
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    times = Flow(times=LogitNormalTimes(mean=0.4, std=0.7)).build().draw(streams(20000))
    logit = torch.logit(times)
    assert logit.mean().item() == pytest.approx(0.4, abs=0.02) and logit.std().item() == pytest.approx(0.7, abs=0.02)


def test_flow_path_is_linear() -> None:
    process = Flow(time_scale=1000).build()
    t = torch.tensor([0.0, 0.25, 1.0])
    alpha, sigma = process.levels(t)
    assert torch.equal(alpha + sigma, torch.ones(3).double()) and torch.equal(sigma, t.double())
    assert process.network_time(t).tolist() == [0, 250, 1000]
    assert process.fraction(t).tolist() == [0, 0.25, 1 - 2**-24]
    grid = process.grid(4)
    assert grid.time.tolist() == [1000, 750, 500, 250] and grid.sigma.tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert grid.steps.log_variance.isfinite().all()


def test_a_shift_scales_the_noise_level_of_every_time_in_training_and_sampling() -> None:
    """Esser et al. 2024, equation 23: sigma / alpha is scaled by s; the ends stay; the sampler's shift has priority."""
    plain, moved = Flow(time_scale=1000).build(), Flow(time_scale=1000, shift=3.0).build()
    for before, after in (
        (plain.draw(streams(50)), moved.draw(streams(50))),
        (plain.grid(8).sigma[1:-1], moved.grid(8).sigma[1:-1]),
        (plain.grid(8).sigma[1:-1], Euler(num_steps=8, shift=3.0).grid(Flow(shift=0.2)).sigma[1:-1]),
    ):
        torch.testing.assert_close(after / (1 - after), 3 * before / (1 - before))
    grid = moved.grid(8)
    assert (grid.sigma[0], grid.sigma[-1], grid.time[0]) == (1, 0, 1000)
    torch.testing.assert_close(grid.time, 1000 * grid.sigma[:-1])
    assert torch.equal(moved.uniform().draw(streams(50)), plain.draw(streams(50)))


@pytest.mark.parametrize("process", [Flow(), Continuous()])
@pytest.mark.parametrize("num_steps", ["ddim50", "10,10", [5, 5], 0, ""])
def test_continuous_time_rejects_respacing(process: Flow | Continuous, num_steps: str) -> None:
    with pytest.raises(ValueError, match="process takes a number of steps, at least 1; got"):
        process.build().grid(num_steps)


def test_invalid_gamma_schedules_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"start must be below end; got start 3\.0 and end -3\.0"):
        SigmoidGamma(start=3, end=-3)
    for kind, start, tau in ((SigmoidGamma, -3, 0.004), (SigmoidGamma, -3, 1e17), (CosineGamma, 0.5, 2000.0)):
        with pytest.raises(ValueError, match="gamma has no numbers with start .* and tau .*Use a tau nearer to 1"):
            kind(start=start, end=1, tau=tau)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Continuous(scale=1.5)
    assert math.isclose(Continuous(scale=1).build().levels(torch.tensor([0.5]))[0].item() ** 2, 0.5)


@pytest.mark.parametrize("objective", [FlowMatching(), Denoising(prediction="v")])
def test_a_flow_is_validated_at_uniform_times(objective: FlowMatching | Denoising) -> None:
    spec, data = DataSpec(channels=1, resolution=1), streams(1000)
    batch = Batch(torch.zeros(1000, 1, 1, 1), {}, data)
    uneven = Flow(times={"type": "logit_normal", "mean": 2.0})
    found = objective.build(uneven.build(), spec).uniform()(lambda x, t: x, batch).time
    assert torch.equal(found, objective.build(Flow().build(), spec)(lambda x, t: x, batch).time)
