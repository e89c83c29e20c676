"""EDM: the process, its preconditioning, the objective and Heun's method with churn (Karras et al. 2022)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams, image_streams, initial_noise
from image_diffusion.core.types import DataSpec
from image_diffusion.objectives.denoising import Denoising, EdmDenoising
from image_diffusion.process import Continuous, Edm, Flow, Process
from image_diffusion.samplers.ode import Heun
from image_diffusion.systems.diffusion.generator import Reading
from trained_digits import train

SPEC = DataSpec(channels=2, resolution=3)
SIGMAS = torch.tensor([0.01, 0.3, 0.5, 4.0, 70.0], dtype=torch.float64)
READING = Reading(process=Edm(), prediction="x0", variance="fixed_small", drops_labels=False)


def test_preconditioning_matches_table_1() -> None:
    """c_skip, c_out, c_in, c_noise and lambda of the last column, at sigma_data 0.5."""
    process = Edm().build()
    x, said, seen = torch.randn(5, 2, 3, 3, dtype=torch.float64), torch.randn(5, 2, 3, 3, dtype=torch.float64), []
    sigma = SIGMAS.view(-1, 1, 1, 1)

    def network(scaled: Tensor, c_noise: Tensor) -> Tensor:
        seen.extend((scaled, c_noise))
        return said

    denoised = process.preconditioned(network)(x, process.network_time(SIGMAS).double())
    total = sigma**2 + 0.25
    torch.testing.assert_close(denoised, 0.25 / total * x + 0.5 * sigma / total.sqrt() * said, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[0], x / total.sqrt(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[1], SIGMAS.log() / 4, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(process.loss_weight(SIGMAS), (SIGMAS**2 + 0.25) / (SIGMAS * 0.5) ** 2)


def test_loss_is_the_unweighted_error_of_the_network_output() -> None:
    """Equation 8: lambda c_out^2 = 1, and F's target is (x0 - c_skip (x0 + n)) / c_out."""
    x, noise = 0.5 * torch.randn(2, 5, 2, 3, 3, dtype=torch.float64)
    objective = EdmDenoising().build(Edm().build(), SPEC)
    sigma = SIGMAS.view(-1, 1, 1, 1)
    total = sigma**2 + 0.25
    goal = (x - 0.25 / total * (x + sigma * noise)) * total.sqrt() / (0.5 * sigma)
    losses = objective.losses_at(lambda x, t: goal + 0.3, x, SIGMAS, noise, {})
    torch.testing.assert_close(losses.loss, torch.full((5,), 0.09, dtype=torch.float64), rtol=1e-3, atol=1e-4)


def test_training_draws_log_normal_sigmas_and_validation_uniform_ones() -> None:
    ids = torch.arange(20000)
    process, streams = Edm(p_mean=-1.0, p_std=0.8).build(), Streams(3, torch.zeros_like(ids), ids)
    drawn = process.draw(streams).log()
    assert drawn.mean().item() == pytest.approx(-1.0, abs=0.02) and drawn.std().item() == pytest.approx(0.8, abs=0.02)
    share = process.fraction(process.uniform().draw(streams))
    assert share.min() >= 0 and share.max() < 1 and share.mean().item() == pytest.approx(0.5, abs=0.01)


def test_noise_levels_follow_equation_5() -> None:
    grid = Edm().build().grid(18)
    assert grid.sigma[0].item() == pytest.approx(80) and grid.sigma[-2].item() == pytest.approx(0.002)
    third = (80 ** (1 / 7) + 2 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert grid.sigma[2].item() == pytest.approx(third) and grid.sigma[-1] == 0 and (grid.alpha == 1).all()
    torch.testing.assert_close(grid.time, grid.sigma[:-1].log() / 4)


@pytest.mark.parametrize(
    "sampler",
    [Heun(num_steps=40), Heun(num_steps=80, s_churn=30), Heun(num_steps=80, s_churn=30, s_min=0.05, s_max=50)],
    ids=["ode", "churn", "churn between"],
)
def test_samples_of_gaussian_data_are_gaussian(sampler: Heun) -> None:
    """For data N(0, 0.25) the optimal network returns 0: D = c_skip x. Within five standard errors of 20,000."""
    count, calls = 20_000, []
    streams = image_streams(torch.arange(count))
    grid = sampler.grid(Edm())
    denoiser = READING.denoiser(lambda x, t: calls.append(t) or torch.zeros_like(x), grid, {}, lambda each: each)
    found = sampler(denoiser, grid, initial_noise(streams, (1,)).double(), streams)
    assert found.var().item() == pytest.approx(0.25, abs=5 * 0.25 * math.sqrt(2 / count))
    assert abs(found.mean().item()) < 5 * 0.5 / math.sqrt(count)
    assert len(calls) == sampler.calls(grid) == 2 * int(sampler.num_steps) - 1


def test_churn_adds_noise_within_its_range_up_to_its_limit() -> None:
    plain = Heun(num_steps=10).grid(Edm()).sigma
    churned = Heun(num_steps=10, s_churn=2, s_min=0.1, s_max=40).grid(Edm()).sigma
    ratio = churned[:-1:2] / plain[:-1]
    inside = (plain[:-1] >= 0.1) & (plain[:-1] <= 40)
    torch.testing.assert_close(ratio, torch.where(inside, 1.2, 1.0).double())
    torch.testing.assert_close(churned[1:-1:2], plain[1:-1])
    most = Heun(num_steps=10, s_churn=100).grid(Edm()).sigma
    torch.testing.assert_close(most[0] / plain[0], torch.tensor(math.sqrt(2)).double())


@pytest.mark.parametrize("process", [Flow(), Continuous()], ids=["flow", "continuous"])
def test_churn_requires_the_edm_process(process: Process) -> None:
    with pytest.raises(ValueError, match=f"only the process edm .* this one is {process.type}. Leave s_churn out"):
        Heun(s_churn=1).grid(process)


def test_edm_process_and_objective_require_each_other() -> None:
    with pytest.raises(
        ValueError, match="The edm process preconditions its network, which objective denoising does not support"
    ):
        Denoising(prediction="x0").build(Edm().build(), SPEC)
    with pytest.raises(ValueError, match="Objective edm needs the edm process"):
        EdmDenoising().build(Flow().build(), SPEC)
    with pytest.raises(ValueError, match="sigma_min must be below sigma_max; got sigma_min 2.0 and sigma_max 1.0"):
        parse(Edm, {"sigma_min": 2.0, "sigma_max": 1.0}, "process")


def test_edm_learns_digits() -> None:
    """As well as flow matching with these patches: samples as close to the digits."""
    small = {"depth": 2, "width": 64, "num_heads": 2, "patch": 8}
    edm = {"process": {"type": "edm"}, "objective": {"type": "edm"}}
    flow = {"objective": {"type": "flow_matching"}}
    errors = [train(80, 32, num_samples=50, guidance=1.0, network=small, **each).error for each in (edm, flow)]
    assert errors[0] < 1.1 * errors[1], errors
