"""Properties of every sampler: equivalences, dependence on the seed alone, and reported errors."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.core.random.streams import image_streams, initial_noise
from image_diffusion.process import Process
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.process.continuous import Continuous, CosineGamma, LinearGamma
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.samplers import Sampler
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.base import SamplerConfig, TimeDifferenceSampler, clipped
from image_diffusion.samplers.ode import DpmSolver, Euler, Heun, UniPc
from image_diffusion.samplers.sde import Sde
from image_diffusion.systems.diffusion.generator import SampleConfig

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own

EVERY: list[SamplerConfig] = [
    Ddpm(num_steps=6),
    Ddpm(num_steps=6, variance="fixed_large", clip_denoised=True),
    Ddim(num_steps=6),
    Ddim(num_steps=6, eta=0.7),
    Euler(num_steps=6),
    Heun(num_steps=6),
    DpmSolver(num_steps=6),
    DpmSolver(num_steps=6, adds_noise=True),
    UniPc(num_steps=6),
    Sde(num_steps=6, last_step="tweedie"),
]
SHAPE = (3, 4, 4)
COSINE = CosineGamma(start=0.2, tau=2.0)
levels = st.lists(st.floats(0.02, 50), min_size=1, max_size=6, unique=True).map(lambda v: sorted(v, reverse=True))


def toy_denoiser(grid: Grid) -> Denoiser:
    """A denoiser: x0 = 0.4 x_t + 0.1, and the resulting eps."""

    def denoiser(x: Tensor, i: int) -> Denoised:
        x0 = 0.4 * x + 0.1
        return Denoised(x0, (x - grid.alpha[i].item() * x0) / grid.sigma[i].item())

    return denoiser


def preserving(noise_levels: list[float]) -> Grid:
    """The variance-preserving path at the given sigma / alpha, and the clean sample."""
    level = torch.tensor([*noise_levels, 0.0], dtype=torch.float64)
    return Grid(level[:-1], (1 + level**2).rsqrt(), level * (1 + level**2).rsqrt())


@settings(max_examples=50, deadline=None)
@given(levels=levels, seed=st.integers(0, 2**40))
def test_ddim_with_eta_one_equals_ancestral_sampling(levels: list[float], seed: int) -> None:
    grid, streams = preserving(levels), image_streams(torch.tensor([seed, seed + 1]))
    noise = initial_noise(streams, SHAPE).double()
    ddim = [step.x for step in Ddim(eta=1.0).trajectory(toy_denoiser(grid), grid, noise, streams)]
    ddpm = [step.x for step in Ddpm().trajectory(toy_denoiser(grid), grid, noise, streams)]
    torch.testing.assert_close(torch.stack(ddim), torch.stack(ddpm), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(kept=st.integers(2, 40), eta=st.floats(0, 1), data=st.data())
def test_ddim_variance_is_eta_squared_times_posterior_variance(kept: int, eta: float, data: st.DataObject) -> None:
    """On the discrete process: beta_t (1 - alpha_bar_{t-1}) / (1 - alpha_bar_t), Eq. 7 of Ho et al. 2020."""
    process = Discrete(respacing=kept).build()
    t = data.draw(st.integers(1, kept - 1))
    i = kept - 1 - t
    whole = process.grid()
    grid = Grid(whole.time[i : i + 1], whole.alpha[i : i + 2], whole.sigma[i : i + 2])
    x0 = torch.zeros(1, 2000, dtype=torch.float64)
    streams = image_streams(torch.tensor([7]))
    (step,) = Ddim(eta=eta).steps(lambda x, i: Denoised(x0, x0), grid, x0, streams)
    before, after = process.alpha_bar[t - 1].item(), process.alpha_bar[t].item()
    posterior = process.betas[t].item() * (1 - before) / (1 - after)
    drawn = next(iter(Ddpm().steps(lambda x, i: Denoised(x0, x0), grid, x0, streams))).x / math.sqrt(posterior)
    assert drawn.var().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 2000))
    torch.testing.assert_close(step.x, eta * math.sqrt(posterior) * drawn, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(num_steps=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_straight_paths_are_exact_in_one_euler_step(num_steps: int, seed: int) -> None:
    """If each noise maps to one image, the velocity eps - x0 is constant (Liu et al. 2023, rectified flow)."""
    streams = image_streams(torch.tensor([seed]))
    noise, x0 = initial_noise(streams, SHAPE).double(), streams.normal("image", SHAPE).double()
    for sampler in (Euler(num_steps=num_steps), Heun(num_steps=num_steps)):
        result = sampler(lambda x, i: Denoised(x0, noise), sampler.grid(Flow()), noise, streams)
        torch.testing.assert_close(result, x0, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(levels=levels)
def test_euler_is_ddim_without_noise(levels: list[float]) -> None:
    grid, streams = preserving(levels), image_streams(torch.arange(2))
    noise = initial_noise(streams, SHAPE).double()
    ddim, euler = (sampler(toy_denoiser(grid), grid, noise, streams) for sampler in (Ddim(), Euler()))
    torch.testing.assert_close(ddim, euler, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sampler", EVERY, ids=lambda s: s.type)
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(5)), size=st.integers(1, 5))
def test_image_depends_only_on_its_seed(sampler: SamplerConfig, order: list[int], size: int) -> None:
    """The same bits in any batch: alone, with others, first or last."""
    grid = sampler.grid(Continuous())
    seeds = torch.tensor([3, 1, 4, 2**33, 5])

    def sample(chosen: Tensor) -> Tensor:
        streams = image_streams(chosen)
        return sampler(toy_denoiser(grid), grid, initial_noise(streams, SHAPE), streams)

    chosen = torch.tensor(order[:size])
    assert torch.equal(sample(seeds[chosen]), sample(seeds)[chosen])


@pytest.mark.parametrize("sampler", EVERY, ids=lambda s: s.type)
def test_every_sampler_returns_the_image_of_a_perfect_network(sampler: SamplerConfig) -> None:
    """In float32, for every process and noise, also if the process scales the image by 0.5."""
    processes: list[Process] = [Discrete(), Continuous(), Continuous(scale=0.5)]
    steps_between = isinstance(sampler, TimeDifferenceSampler) and sampler.draws_noise
    for process in [*processes, *([] if steps_between else [Flow()])]:
        grid = sampler.grid(process)
        streams = image_streams(torch.arange(2))
        image = streams.uniform("image", SHAPE) * 2 - 1

        def perfect(x: Tensor, i: int, grid: Grid = grid, image: Tensor = image) -> Denoised:
            return Denoised(image, (x - grid.alpha[i].item() * image) / grid.sigma[i].item())

        result = sampler(perfect, grid, initial_noise(streams, SHAPE), streams)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, image, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sampler", EVERY, ids=lambda s: s.type)
def test_trajectory_ends_at_the_sample(sampler: SamplerConfig) -> None:
    """One entry per step; if the process ends at x = alpha x0, the sample is x / alpha."""
    grid = sampler.grid(Continuous())
    shrunk = Grid(grid.time, 0.5 * grid.alpha, grid.sigma)
    streams = image_streams(torch.arange(2))
    noise = initial_noise(streams, SHAPE)
    steps = list(sampler.trajectory(toy_denoiser(shrunk), shrunk, noise, streams))
    assert len(steps) == 6
    assert torch.equal(sampler(toy_denoiser(shrunk), shrunk, noise, streams), steps[-1].x / 0.5)


def test_clipped_x0_and_eps_remain_consistent_with_x_t() -> None:
    grid = preserving([5.0, 1.0, 0.2])
    x = initial_noise(image_streams(torch.arange(4)), SHAPE).double()
    denoised = clipped(lambda x_t, i: Denoised(3 * x_t, -x_t, log_variance=x_t), grid)(x, 1)
    assert denoised.x0.abs().max() == 1
    torch.testing.assert_close(grid.alpha[1] * denoised.x0 + grid.sigma[1] * denoised.eps, x)
    assert denoised.log_variance is x


@pytest.mark.parametrize("sampler", [Ddpm(), Ddim(eta=0.5)], ids=lambda s: s.type)
def test_samplers_that_draw_noise_are_rejected_for_flow(sampler: SamplerConfig) -> None:
    with pytest.raises(ValueError, match=rf"The {sampler.type} sampler adds noise at every step.*Use sde"):
        sampler.grid(Flow())


@pytest.mark.parametrize(
    "process",
    [Flow(), Flow(shift=6.0), Continuous(), Continuous(schedule=LinearGamma(), scale=0.5), Continuous(schedule=COSINE)],
    ids=lambda process: process.type,
)
@pytest.mark.parametrize(("num_steps", "most"), [(1, 1e-12), (1000, 0.07)])
def test_last_step_of_the_sde_starts_at_low_noise(process: Flow | Continuous, num_steps: int, most: float) -> None:
    """Its mean leaves about as much noise in the image as at its start; a single step returns x0."""
    sampler, streams = Sde(num_steps=num_steps), image_streams(torch.arange(4))
    grid = sampler.grid(process)
    noise = initial_noise(streams, (3, 16, 16)).double()

    def perfect(x: Tensor, i: int) -> Denoised:
        x0 = torch.full_like(x, 0.3)
        return Denoised(x0, (x - grid.alpha[i].item() * x0) / grid.sigma[i].item())

    assert (sampler(perfect, grid, noise, streams) - 0.3).std() < most
    last = grid.sigma[-2] / (grid.alpha[-2] + grid.sigma[-2])
    assert num_steps == 1 or last.item() == pytest.approx(0.04, rel=1e-5)


def test_sde_last_step_has_the_published_size() -> None:
    assert Sde().grid(Flow()).sigma[-2].item() == 0.04
    assert Sde(shift=3.0).grid(Flow()).sigma[-2].item() == pytest.approx(0.04, rel=1e-12)
    assert Sde(last_step_size=0.1, shift=3.0).grid(Flow()).sigma[-2].item() == pytest.approx(0.25)


@pytest.mark.parametrize("sampler", [Euler(), Heun(), DpmSolver(), UniPc()], ids=lambda s: s.type)
def test_ode_solvers_reject_a_time_difference(sampler: SamplerConfig) -> None:
    with pytest.raises(ValueError, match=r"sampler\.time_difference is not a known key"):
        parse(SampleConfig, {"sampler": {"type": sampler.type, "time_difference": 0.1}}, "sample.yaml")


@pytest.mark.parametrize("sampler", [Ddpm, Ddim])
def test_time_difference_requires_continuous_time(sampler: type[Ddpm | Ddim]) -> None:
    assert sampler(time_difference=0.1, num_steps=5).grid(Continuous()).target is not None
    with pytest.raises(
        ValueError, match=r"time_difference is 0\.1, but in the process discrete time is not continuous"
    ):
        sampler(time_difference=0.1).grid(Discrete())


def test_unset_sampler_settings_follow_the_model() -> None:
    assert Ddpm().fitted("fixed_large", True).model_dump(include={"variance", "clip_denoised"}) == {
        "variance": "fixed_large",
        "clip_denoised": True,
    }
    assert Ddpm().fitted("learned_range", False).variance == "fixed_small"
    kept = Ddpm(variance="fixed_small", clip_denoised=False).fitted("fixed_large", True)
    assert (kept.variance, kept.clip_denoised) == ("fixed_small", False)


def test_mistakes_are_told_in_one_line() -> None:
    grid = Ddim(eta=0.5).grid(Discrete())
    with pytest.raises(ValueError, match=r"eta is 0\.5, but only a deterministic sampler can be run backwards"):
        Ddim(eta=0.5).encode(toy_denoiser(grid), grid, torch.zeros(1, *SHAPE))
    with pytest.raises(ValueError, match=r"takes a number of steps, at least 1; got 'ddim50'"):
        Euler(num_steps="ddim50").grid(Flow())
    with pytest.raises(ValueError, match=r"shift is 3, but the process is discrete: only flow's times shift"):
        Euler(shift=3.0).grid(Discrete())
    with pytest.raises(ValueError, match=r"last_step_size is 0\.1, but the process discrete defines where noise ends"):
        Sde(last_step_size=0.1).grid(Discrete())


class Section(Config):
    """A section that holds a sampler."""

    sampler: Sampler


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "dpm"}, "Unknown sampler 'dpm'. Known: ddpm, ddim, euler, heun, dpm_solver, unipc, sde, flow_map."),
        ({"type": "ddim", "num_step": 3}, "sampler.num_step is not a known key. Did you mean sampler.num_steps?"),
        (
            {"type": "ddim", "num_steps": 0},
            "sampler.num_steps: got 0; expected a number of steps, at least 1, or which",
        ),
        ({"type": "ddim", "num_steps": [5, True]}, "sampler.num_steps: got [5, True]; expected a number of steps"),
        ({"type": "ddim", "num_steps": [0]}, "sampler.num_steps: got [0]; expected a number of steps"),
        ({"type": "ddim", "eta": 2}, "sampler.eta is 2: input should be less than or equal to 1."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_sampler_configurations_are_reported_in_one_line(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sample.yaml: {message}")) as caught:
        parse(Section, {"sampler": data}, "sample.yaml")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("sampler", EVERY, ids=lambda s: s.type)
def test_sampler_configuration_survives_a_round_trip(sampler: SamplerConfig) -> None:
    assert parse(Sampler, dump(sampler), "sample.yaml") == sampler


@pytest.mark.parametrize("sampler", [DpmSolver(), UniPc()], ids=lambda s: s.type)
def test_multistep_solvers_match_diffusers_at_its_noise_levels(sampler: SamplerConfig) -> None:
    """Same numbers as the scheduler in diffusers' pipelines, at the timesteps that it chooses."""
    import diffusers

    name = "DPMSolverMultistepScheduler" if sampler.type == "dpm_solver" else "UniPCMultistepScheduler"
    scheduler = getattr(diffusers, name)(prediction_type="epsilon")
    scheduler.set_timesteps(20)
    alpha_bar = Discrete().build().alpha_bar[scheduler.timesteps]
    alpha_bar = torch.cat([alpha_bar, alpha_bar.new_ones(1)])
    grid = Grid(scheduler.timesteps.double(), alpha_bar.sqrt(), (1 - alpha_bar).sqrt())

    def eps(x: Tensor, t: float) -> Tensor:
        return 0.9 * x + 0.1 * math.sin(t / 100)

    def denoiser(x: Tensor, i: int) -> Denoised:
        predicted = eps(x, grid.time[i].item())
        return Denoised((x - grid.sigma[i].item() * predicted) / grid.alpha[i].item(), predicted)

    streams = image_streams(torch.arange(2))
    noise = initial_noise(streams, SHAPE)
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(eps(x, t.item()), t, x, return_dict=False)[0]
    torch.testing.assert_close(sampler(denoiser, grid, noise, streams), x, rtol=1e-3, atol=1e-3)


def test_diffusers_is_imported_lazily() -> None:
    """Importing it takes seconds, and most samplers do not use it."""
    code = "import sys, image_diffusion.samplers; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
