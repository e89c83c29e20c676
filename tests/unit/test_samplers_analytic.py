"""Samplers on Gaussian data, where the optimal denoiser, the ODE's solution and the result are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams, image_streams, initial_noise, step_noise
from image_diffusion.process.base import Denoised, Grid
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.base import SamplerConfig, initial_scale
from image_diffusion.samplers.ode import DpmSolver, Euler, Heun, UniPc, run_scheduler
from image_diffusion.samplers.sde import FORMS, Form, Sde

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own

F64 = torch.float64
MEAN = torch.tensor([0.7, -0.4, 0.1], dtype=F64)
FACTOR = torch.tensor([[0.9, 0.0, 0.0], [0.3, 0.5, 0.0], [-0.2, 0.1, 0.3]], dtype=F64)
COVARIANCE = FACTOR @ FACTOR.T


@dataclass(frozen=True)
class GaussianDenoiser:
    """E[x0 | x_t] for x0 ~ N(MEAN, COVARIANCE), along the covariance's eigenvectors."""

    grid: Grid
    covariance: Tensor

    def __call__(self, x: Tensor, i: int) -> Denoised:
        alpha, sigma = self.grid.alpha[i], self.grid.sigma[i]
        values, vectors = torch.linalg.eigh(self.covariance)
        gain = alpha * values / (alpha**2 * values + sigma**2)
        x0 = (MEAN + ((x.double() - alpha * MEAN) @ vectors * gain) @ vectors.T).to(x)
        return Denoised(x0, (x - alpha.item() * x0) / sigma.item())


def exact_flow(grid: Grid, noise: Tensor) -> Tensor:
    """Return the end of the probability flow ODE, which keeps (x_t - mean) / standard deviation per eigenvector."""
    alpha, sigma = grid.alpha[0], grid.sigma[0]
    values, vectors = torch.linalg.eigh(COVARIANCE)
    shrink = (values / (alpha**2 * values + sigma**2)).sqrt()
    return MEAN + ((initial_scale(grid) * noise - alpha * MEAN) @ vectors * shrink) @ vectors.T


def straight(num_steps: int) -> Grid:
    """The path of flow matching, evenly spaced in time."""
    t = torch.linspace(1, 0, num_steps + 1, dtype=F64)
    return Grid(t[:-1], 1 - t, t)


def preserving(num_steps: int) -> Grid:
    """alpha^2 + sigma^2 = 1, evenly spaced in angle from just below a right angle."""
    angle = torch.linspace(math.pi / 2 - 1e-3, 0, num_steps + 1, dtype=F64)
    return Grid(angle[:-1], angle.cos(), angle.sin())


def noise_levels(num_steps: int) -> Tensor:
    """sigma / alpha from 20 to 0.002 as Karras et al. 2022 space them (Eq. 5, rho = 7), then 0."""
    share = torch.linspace(0, 1, num_steps, dtype=F64)
    levels = (20 ** (1 / 7) + share * (0.002 ** (1 / 7) - 20 ** (1 / 7))) ** 7
    return torch.cat([levels, levels.new_zeros(1)])


def exploding(num_steps: int) -> Grid:
    """alpha = 1 (EDM)."""
    level = noise_levels(num_steps)
    return Grid(level[:-1], torch.ones_like(level), level)


def straight_levels(num_steps: int) -> Grid:
    """The straight path at the noise levels of EDM."""
    level = noise_levels(num_steps)
    return Grid(level[:-1], 1 / (1 + level), level / (1 + level))


def preserving_levels(num_steps: int) -> Grid:
    """The variance-preserving path at the noise levels of EDM."""
    level = noise_levels(num_steps)
    return Grid(level[:-1], (1 + level**2).rsqrt(), level * (1 + level**2).rsqrt())


def label(value: object) -> str:
    """Return the parametrize id of a parameter."""
    if isinstance(value, SamplerConfig):
        return "-".join([value.type, *(f"{k}={v}" for k, v in value.model_dump(exclude_defaults=True).items())])
    return str(getattr(value, "__name__", value))


def observed_order(sampler: SamplerConfig, path: Callable[[int], Grid], num_steps: int) -> float:
    """Return log2 of the factor by which twice the steps reduce the largest error."""
    streams = image_streams(torch.arange(64))
    noise = initial_noise(streams, (3,)).double()
    errors = []
    for count in (num_steps, 2 * num_steps):
        grid = path(count)
        result = sampler(GaussianDenoiser(grid, COVARIANCE), grid, noise, streams)
        errors.append((result - exact_flow(grid, noise)).abs().max().item())
    return math.log2(errors[0] / errors[1])


@pytest.mark.parametrize("path", [straight, preserving, exploding])
@pytest.mark.parametrize(("sampler", "order"), [(Ddim(), 1), (Euler(), 1), (Heun(), 2)], ids=label)
def test_order_of_one_step_solvers(sampler: SamplerConfig, order: int, path: Callable[[int], Grid]) -> None:
    assert observed_order(sampler, path, 64) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("sampler", [Ddpm, Ddim, DpmSolver, UniPc, Euler, Heun])
def test_one_discrete_step_gives_the_conditional_mean(
    sampler: type[SamplerConfig],
) -> None:
    streams = image_streams(torch.arange(64))
    noise = initial_noise(streams, (3,)).double()
    for num_steps in (1, "1", [1]):
        one = sampler(num_steps=num_steps)  # type: ignore[arg-type]
        grid = one.grid(Discrete())
        denoiser = GaussianDenoiser(grid, COVARIANCE)
        result = one(denoiser, grid, noise, streams)
        assert grid.time.tolist() == [999]
        torch.testing.assert_close(result, denoiser(noise, 0).x0, rtol=0, atol=1e-5)
        torch.testing.assert_close(result, MEAN.expand_as(result), rtol=0, atol=0.05)


@pytest.mark.parametrize("sampler", [DpmSolver(), DpmSolver(adds_noise=True), UniPc()], ids=label)
def test_twenty_discrete_steps_reproduce_the_standard_deviation(sampler: SamplerConfig) -> None:
    """The last step of order 2 ends at diffusers' last timestep; at timestep 0, with far less noise, it overshoots."""
    streams = image_streams(torch.arange(2000))
    noise, grid = initial_noise(streams, (3,)).double(), sampler.grid(Discrete())
    isotropic = GaussianDenoiser(grid, 0.25 * torch.eye(3, dtype=F64))
    deviations = sampler(isotropic, grid, noise, streams).std(0) / noise.std(0)
    assert grid.num_steps == 20
    assert deviations.numpy() == pytest.approx(0.5, rel=0.06)


def test_multistep_solvers_match_timesteps_and_steps_of_diffusers() -> None:
    import diffusers

    betas: dict[str, Any] = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
    schedulers = (diffusers.DPMSolverMultistepScheduler(**betas), diffusers.UniPCMultistepScheduler(**betas))
    for scheduler, sampler in zip(schedulers, (DpmSolver(), UniPc()), strict=True):
        streams = image_streams(torch.arange(64))
        noise, grid = initial_noise(streams, (3,)).double(), sampler.grid(Discrete())
        denoiser = GaussianDenoiser(grid, COVARIANCE)
        scheduler.set_timesteps(20)
        assert grid.time.tolist() == scheduler.timesteps.tolist()
        x = noise
        for i, t in enumerate(scheduler.timesteps):
            x = scheduler.step(denoiser(x, i).eps, t, x, return_dict=False)[0]
        torch.testing.assert_close(sampler(denoiser, grid, noise, streams), x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_steps", ["20", "ddim20", [20], "", 1000])
def test_respacings_and_all_timesteps_include_timestep_0(num_steps: str | int | list[int]) -> None:
    grid = DpmSolver(num_steps=num_steps).grid(Discrete())
    torch.testing.assert_close(grid.time, Discrete().build().grid(num_steps).time)
    assert grid.time[-1] == 0
    assert UniPc(num_steps=250).grid(Discrete(respacing="250")).time[-1] == 0  # all timesteps used in training
    with pytest.raises(ValueError, match=r"asks for 1001 timesteps of a section that has 1000. Use at most 1000."):
        UniPc(num_steps=1001).grid(Discrete())


@pytest.mark.parametrize("path", [straight_levels, preserving_levels, exploding])
@pytest.mark.parametrize(("sampler", "order"), [(DpmSolver(), 2), (UniPc(), 3)], ids=label)
def test_order_of_multistep_solvers(sampler: SamplerConfig, order: int, path: Callable[[int], Grid]) -> None:
    """UniPC's predictor has order 2 and its corrector one more (Zhao et al. 2023, section 3)."""
    assert observed_order(sampler, path, 32) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize("path", [straight, preserving])
def test_encoding_and_sampling_recover_the_image_with_order_one(path: Callable[[int], Grid]) -> None:
    streams = image_streams(torch.arange(64))
    x0 = MEAN + initial_noise(streams, (3,)).double() @ FACTOR.T
    errors = []
    for num_steps in (64, 128):
        grid = path(num_steps)
        denoiser = GaussianDenoiser(grid, COVARIANCE)
        returned = Ddim()(denoiser, grid, Ddim().encode(denoiser, grid, x0), streams)
        errors.append((returned - x0).abs().max().item())
    assert errors[0] < 0.2
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("sampler", [DpmSolver(), UniPc()], ids=lambda s: s.type)
def test_multistep_solvers_start_where_alpha_is_zero(sampler: SamplerConfig) -> None:
    """With even times the log-SNR is unbounded, which lowers order 2 by a logarithm; all values stay finite."""
    assert observed_order(sampler, straight, 128) > 1.6


def test_scheduler_runs_on_grid_levels_and_starts_at_finite_log_snr() -> None:
    """alpha / sigma of the straight path is 0 at sigma = 1; like diffusers' UniPC it then starts at 1 - 1e-6."""
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(prediction_type="sample", use_flow_sigmas=True)
    grid = straight(4)
    steps = run_scheduler(scheduler, GaussianDenoiser(grid, COVARIANCE), grid, torch.ones(1, 3, dtype=F64))
    assert len(list(steps)) == 4
    assert scheduler.sigmas.tolist() == pytest.approx([1 - 1e-6, 0.75, 0.5, 0.25, 0], abs=1e-9)


@pytest.mark.parametrize("sampler", [Ddim(), DpmSolver(), UniPc()], ids=lambda s: s.type)
def test_exponential_integrators_depend_only_on_the_noise_levels_of_a_path(sampler: SamplerConfig) -> None:
    streams = image_streams(torch.arange(8))
    noise = initial_noise(streams, (3,)).double()
    results = []
    for path in (straight_levels, preserving_levels, exploding):
        grid = path(10)
        start = noise / initial_scale(grid) * grid.sigma[0]  # the same x_t / alpha_t on all three
        results.append(sampler(GaussianDenoiser(grid, COVARIANCE), grid, start, streams))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-5)


def moments(sampler: Sde, grid: Grid) -> tuple[float, float]:
    """Return the exact mean and variance of samples of N(0.7, 0.25), summing the squared effect of each noise."""

    def denoiser(x: Tensor, i: int) -> Denoised:
        alpha, sigma = grid.alpha[i].item(), grid.sigma[i].item()
        x0 = 0.7 + alpha * 0.25 / (alpha**2 * 0.25 + sigma**2) * (x - alpha * 0.7)
        return Denoised(x0, (x - alpha * x0) / sigma)

    count = grid.num_steps + 1  # number of noises: the initial one, and one for each step but the last
    rows = torch.cat([torch.zeros(1, count, dtype=F64), torch.eye(count, dtype=F64)])  # the first row has no noise

    class Impulses(Streams):
        """The noise of step i: 1 in row i + 2."""

        def normal(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
            return rows[:, int(self.epoch[0]) + 1, None]

    index = torch.zeros(count + 1, dtype=torch.int64)
    samples = sampler(denoiser, grid, rows[:, :1], Impulses(0, index, index))[:, 0]
    return samples[0].item(), (samples[1:] - samples[0]).square().sum().item()


@pytest.mark.parametrize("path", [straight, preserving])
@pytest.mark.parametrize("last_step", ["mean", "tweedie"])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_diffusion_form_keeps_the_marginals_with_order_one(
    form: Form, last_step: Literal["mean", "tweedie"], path: Callable[[int], Grid]
) -> None:
    """Mean and variance of Gaussian data without sampling error. For some forms the error of order 1 cancels."""
    sampler = Sde(diffusion=form, last_step=last_step)
    errors = []
    for num_steps in (200, 400):
        mean, variance = moments(sampler, path(num_steps))
        assert mean == pytest.approx(0.7, abs=2e-4)  # the second path starts with a trace of signal
        errors.append(abs(variance - 0.25))
    assert errors[1] < 2e-3
    assert math.log2(errors[0] / errors[1]) > 0.75


def test_sde_without_diffusion_equals_the_ode() -> None:
    streams = image_streams(torch.arange(8))
    noise, grid = initial_noise(streams, (3,)).double(), straight(20)
    samples = [
        sampler(GaussianDenoiser(grid, COVARIANCE), grid, noise, streams) for sampler in (Sde(norm=1e-12), Euler())
    ]
    torch.testing.assert_close(*samples, rtol=0, atol=1e-4)


def test_sde_follows_the_published_grid_and_steps() -> None:
    """249 steps of (1 - 0.04) / 249 and one of 0.04; D = t: x + dt (x0 - eps) - dt eps + sqrt(2 t dt) z."""
    grid, size = Sde().grid(Flow()), 0.96 / 249
    assert grid.num_steps == Sde().calls(grid) == 250
    torch.testing.assert_close(grid.sigma[:3], torch.tensor([1, 1 - size, 1 - 2 * size], dtype=F64))
    assert grid.sigma[-2:].tolist() == pytest.approx([0.04, 0])
    streams = image_streams(torch.arange(2))
    x = initial_noise(streams, (3,)).double()
    steps = Sde().trajectory(GaussianDenoiser(grid, COVARIANCE), grid, x, streams)
    for i in range(2):
        t, denoised = grid.sigma[i].item(), GaussianDenoiser(grid, COVARIANCE)(x, i)
        x = x + size * (denoised.x0 - 2 * denoised.eps) + math.sqrt(2 * t * size) * step_noise(streams, i, x)
        torch.testing.assert_close(next(steps).x, x)


SAMPLERS = [
    (Ddpm(), preserving, 400),
    (Ddpm(variance="fixed_large"), preserving, 400),
    (Ddim(), preserving, 400),
    (Ddim(eta=1.0), preserving, 400),
    (Ddim(eta=0.5), preserving, 400),
    (Ddim(), straight, 400),
    (Euler(), straight, 400),
    (Euler(), exploding, 400),
    (Heun(), straight, 50),
    (Heun(), preserving, 50),
    (Heun(), exploding, 50),
    (DpmSolver(), straight, 50),
    (DpmSolver(), preserving, 50),
    (DpmSolver(adds_noise=True), straight_levels, 50),
    (DpmSolver(adds_noise=True), preserving_levels, 50),
    (UniPc(), straight, 50),
    (UniPc(), preserving, 50),
    (Sde(), straight, 400),
    (Sde(diffusion="sbdm"), preserving, 400),
]


@pytest.mark.parametrize(("sampler", "path", "num_steps"), SAMPLERS, ids=label)
def test_mean_and_covariance_are_recovered(sampler: SamplerConfig, path: Callable[[int], Grid], num_steps: int) -> None:
    """Within five standard errors of 10,000 samples: sqrt(S_ii / n) and sqrt((S_ii S_jj + S_ij^2) / n)."""
    count = 10_000
    streams = image_streams(torch.arange(count), seed=1)
    grid = path(num_steps)
    samples = sampler(GaussianDenoiser(grid, COVARIANCE), grid, initial_noise(streams, (3,)), streams).double()
    variance = COVARIANCE.diagonal()
    mean_error = (samples.mean(0) - MEAN) / (variance / count).sqrt()
    spread = ((variance[:, None] * variance + COVARIANCE**2) / count).sqrt()
    covariance_error = (samples.T.cov() - COVARIANCE) / spread
    assert mean_error.abs().max() < 5
    assert covariance_error.abs().max() < 5


@pytest.mark.parametrize(
    ("sampler", "calls"),
    [(Ddpm(), 6), (Ddim(), 6), (Euler(), 6), (Heun(), 11), (DpmSolver(), 6), (UniPc(), 6)],
    ids=label,
)
def test_number_of_network_calls_matches_the_sampler(sampler: SamplerConfig, calls: int) -> None:
    grid, asked = preserving(6), []
    optimal = GaussianDenoiser(grid, COVARIANCE)

    def denoiser(x: Tensor, i: int) -> Denoised:
        asked.append(i)
        return optimal(x, i)

    streams = image_streams(torch.arange(2))
    sampler(denoiser, grid, initial_noise(streams, (3,)), streams)
    assert len(asked) == sampler.calls(grid) == calls


@pytest.mark.parametrize("num_steps", [2, 5])
def test_ancestral_sampling_with_the_learned_variance_is_exact_in_few_steps(num_steps: int) -> None:
    """p(x_s | x_t) of isotropic Gaussian data is Gaussian: with its exact variance large steps are exact."""
    grid, count, variance = preserving(num_steps), 10_000, 0.25
    optimal = GaussianDenoiser(grid, variance * torch.eye(3, dtype=F64))

    def denoiser(x: Tensor, i: int) -> Denoised:
        """Var(x_s | x_t) = posterior variance + x0_weight^2 Var(x0 | x_t)."""
        denoised, step = optimal(x, i), grid.steps.at(i, x)
        of_x0 = variance * step.sigma**2 / (step.alpha**2 * variance + step.sigma**2)
        log_variance = (step.variance + step.x0_weight**2 * of_x0).log().expand_as(x)
        return Denoised(denoised.x0, denoised.eps, log_variance)

    streams = image_streams(torch.arange(count))
    samples = Ddpm()(denoiser, grid, initial_noise(streams, (3,)), streams)
    # The last step gives the mean of x0 and draws nothing, so the variance of x0 given the last x_t is missing.
    last = variance * grid.sigma[-2] ** 2 / (grid.alpha[-2] ** 2 * variance + grid.sigma[-2] ** 2)
    expected = variance - last.item()
    assert samples.var(0).numpy() == pytest.approx(expected, abs=5 * expected * math.sqrt(2 / count))
    assert samples.mean(0).numpy() == pytest.approx(MEAN.numpy(), abs=5 * math.sqrt(expected / count))
