"""Schedules, respacing and the discrete process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.process import Process, discrete
from image_diffusion.process.base import Grid
from image_diffusion.process.discrete import (
    Const,
    Cosine,
    Discrete,
    Jsd,
    Linear,
    Quad,
    Sigmoid,
    Warmup10,
    Warmup50,
    space_timesteps,
)

SCHEDULES = [Linear(), Cosine(), Quad(), Quad(scaled=True), Warmup10(), Warmup50(), Const(), Jsd(), Sigmoid()]


class Section(Config):
    process: Process


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.type)
@pytest.mark.parametrize("num_timesteps", [20, 101, 1000])
def test_every_schedule_gives_decreasing_alpha_bar(schedule: object, num_timesteps: int) -> None:
    process = Discrete(schedule=schedule, num_timesteps=num_timesteps).build()
    assert process.alpha_bar.dtype == torch.float64
    assert (process.alpha_bar.diff() < 0).all()
    assert process.steps.log_variance.isfinite().all() and process.steps.log_beta.isfinite().all()
    torch.testing.assert_close(process.betas, schedule.betas(num_timesteps), rtol=1e-9, atol=1e-13)


def test_sigmoid_schedule_is_logistic_between_its_ends() -> None:
    betas = Sigmoid(beta_start=0.001, beta_end=0.201, scaled=False).betas(5)
    logistic = [1 / (1 + math.exp(-u)) for u in (-6, -3, 0, 3, 6)]
    assert betas.tolist() == pytest.approx([0.001 + 0.2 * each for each in logistic], rel=1e-12)


def test_the_betas_of_equal_schedules_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, computed = Const.betas, []
    monkeypatch.setattr(Const, "betas", lambda *schedule: computed.append(schedule) or compute(*schedule))
    for beta in (0.0123, 0.0123, 0.0124):
        assert Discrete(schedule=Const(beta=beta)).build().alpha_bar[0].item() == pytest.approx(1 - beta, rel=1e-12)
    assert len(computed) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_respacing_keeps_the_requested_number_of_timesteps(num_timesteps: int, counts: list[int]) -> None:
    size, longer = divmod(num_timesteps, len(counts))
    sizes = [size + (i < longer) for i in range(len(counts))]
    if sum(counts) == 0 or any(count > size for count, size in zip(counts, sizes, strict=True)):
        with pytest.raises(ValueError, match="Respacing"):
            space_timesteps(num_timesteps, counts)
        return
    kept = space_timesteps(num_timesteps, counts)
    assert kept == sorted(set(kept)) == space_timesteps(num_timesteps, ",".join(map(str, counts)))
    start = 0
    for count, size in zip(counts, sizes, strict=True):
        section = [t for t in kept if start <= t < start + size]
        assert len(section) == count
        if count > 1:
            assert section[0] == start and section[-1] == start + size - 1
        start += size
    assert start == num_timesteps and kept[-1] < num_timesteps


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.sampled_from(SCHEDULES))
def test_respaced_process_keeps_the_marginals(counts: list[int], schedule: object) -> None:
    whole = Discrete(schedule=schedule, num_timesteps=60).build()
    spaced = whole.respaced(counts)
    assert torch.equal(spaced.alpha_bar, whole.alpha_bar[spaced.timestep_map])
    torch.testing.assert_close(torch.cumprod(1 - spaced.betas, 0), spaced.alpha_bar, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES[:-2], ids=lambda each: each.type)
def test_posterior_follows_bayes_rule(schedule: object) -> None:
    """c1, c2 and the variance by Ho et al. 2020, equations 6 and 7, from the betas themselves."""
    process = Discrete(schedule=schedule, num_timesteps=200).build()
    betas, bar, steps = process.betas, process.alpha_bar, process.steps
    previous = torch.cat([torch.ones(1), bar[:-1]])
    torch.testing.assert_close(steps.x0_weight, betas * previous.sqrt() / (1 - bar), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(steps.x_t_weight, (1 - previous) * (1 - betas).sqrt() / (1 - bar), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(steps.variance, betas * (1 - previous) / (1 - bar), rtol=1e-8, atol=1e-14)


def test_posterior_steps_keep_the_marginals() -> None:
    """Drawing x_s from q(x_s | x_t, x0) keeps the marginal of x_s, also for levels off the unit circle."""
    levels = torch.tensor([[0.1, 0.9], [0.3, 0.8], [0.5, 0.4], [1.0, 0.0]]).double()
    alpha, sigma = levels.unbind(1)
    steps = Grid(time=torch.arange(3.0), alpha=alpha, sigma=sigma).steps
    mean = steps.x0_weight + steps.x_t_weight * alpha[:-1]
    variance = steps.variance + steps.x_t_weight**2 * sigma[:-1] ** 2
    torch.testing.assert_close(mean, alpha[1:])
    torch.testing.assert_close(variance, sigma[1:] ** 2)


def test_grid_runs_from_most_noise_to_clean_sample() -> None:
    process = Discrete(rescale_timesteps=True, num_timesteps=500).build()
    grid = process.grid("ddim50")
    assert grid.num_steps == 50 and grid.time[0] == 980 and grid.time[-1] == 0
    assert (grid.alpha.diff() > 0).all() and grid.alpha[-1] == 1 and grid.sigma[-1] == 0
    own = process.grid()
    assert own.num_steps == 500
    torch.testing.assert_close(own.steps.log_variance.flip(0), process.steps.log_variance)


def test_respacing_accepts_text_number_or_list() -> None:
    assert space_timesteps(1000, 250) == space_timesteps(1000, "250") == space_timesteps(1000, [250])
    assert space_timesteps(7, "") == list(range(7))


def test_tables_are_copied_to_a_device_once() -> None:
    process = Discrete().build()
    t = torch.tensor([0, 999])
    assert process.steps_on(t.device) is process.steps_on(t.device)
    alpha, sigma = process.levels(t)
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(2).double())
    assert process.network_time(t).dtype == torch.float32


def test_process_configuration_is_validated_without_building_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems have a default process, so tables would be computed at the start of every command."""
    monkeypatch.delattr(discrete, "DiscreteProcess")
    assert Discrete(respacing="10").num_timesteps == 1000
    with pytest.raises(ValueError, match="Every beta must lie in"):
        Discrete(num_timesteps=10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"num_timesteps": 10},
            "Every beta must lie in (0, 1]; got a maximum of 2.0 from linear(num_steps=10). Use num_steps >= 20.",
        ),
        ({"schedule": {"type": "quad", "beta_end": 0.5, "scaled": True}}, None),
        (
            {"schedule": {"type": "quad", "beta_end": 0.5, "scaled": True}, "num_timesteps": 100},
            "got a maximum of 5.0 from quad(num_steps=100). Use num_steps >= 500.",
        ),
        (
            {"schedule": {"type": "cosin"}},
            "Unknown process.schedule 'cosin'. Known: linear, cosine, quad, warmup10, warmup50, const, jsd, sigmoid.",
        ),
        ({"respacing": 1001}, "asks for 1001 timesteps of a section that has 1000. Use at most 1000."),
        ({"respacing": [10, 600, 10]}, "asks for 600 timesteps of a section that has 333."),
        ({"respacing": "ddim600"}, 'no integer stride keeps 600 of 1000 timesteps. Use "600" for uneven strides.'),
        ({"respacing": "ddim2000"}, "Use at most 1000."),
        ({"respacing": "10,x"}, "'x' is not an integer."),
        ({"respacing": [5, -1]}, "is not a list of counts."),
        ({"respacing": "0"}, "keeps no timestep."),
        ({"num_timesteps": 0}, "process.num_timesteps is 0"),
        ({"schedule": {"type": "linear", "beta_strat": 1e-4}}, "Did you mean process.schedule.beta_start?"),
        ({"type": "discreet"}, "Unknown process 'discreet'. Known: discrete, continuous, flow, edm."),
    ],
)
def test_invalid_discrete_processes_are_rejected(data: dict[str, object], message: str | None) -> None:
    whole = {"process": {"type": "discrete"} | data}
    if message is None:
        section = parse(Section, whole, "x.yaml")
        assert parse(Section, dump(section), "x.yaml") == section
        return
    with pytest.raises(ValueError) as error:
        parse(Section, whole, "x.yaml")
    assert message in str(error.value)
