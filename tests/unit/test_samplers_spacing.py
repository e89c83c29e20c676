"""Karras's spacing of the steps of a discrete process, against diffusers' numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process import Process
from image_diffusion.process.base import Denoised, Grid
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.discrete import Cosine, Discrete, Jsd
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.base import SpacedByNoise
from image_diffusion.samplers.ode import DpmSolver, Euler, Heun, UniPc
from image_diffusion.samplers.sde import Sde

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own

KARRAS: dict[str, Any] = {"spacing": "karras", "num_steps": 11}
EVERY = [DpmSolver(**KARRAS), DpmSolver(adds_noise=True, **KARRAS), UniPc(**KARRAS), Sde(**KARRAS), Euler(**KARRAS)]
EVERY = [*EVERY, Heun(**KARRAS)]
LINEAR: dict[str, Any] = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "use_karras_sigmas": True}


def scheduler_of_diffusers(name: str) -> Any:
    """Return the diffusers scheduler that corresponds to one of our samplers."""
    import diffusers

    match name:
        case "dpm_solver":
            return diffusers.DPMSolverMultistepScheduler(prediction_type="sample", **LINEAR)
        case "unipc":
            return diffusers.UniPCMultistepScheduler(prediction_type="sample", **LINEAR)
        case "euler":
            return diffusers.EulerDiscreteScheduler(**LINEAR)
    raise ValueError(name)


@pytest.mark.parametrize("num_steps", [4, 20, 50])
def test_karras_sigmas_and_timesteps_match_diffusers(num_steps: int) -> None:
    grid = DpmSolver(spacing="karras", num_steps=num_steps).grid(Discrete())
    for scheduler in map(scheduler_of_diffusers, ["dpm_solver", "unipc", "euler"]):
        scheduler.set_timesteps(num_steps)
        sigmas = scheduler.sigmas.double()
        torch.testing.assert_close((grid.sigma / grid.alpha)[:-1], sigmas[:num_steps], rtol=1e-4, atol=1e-5)
        assert grid.time.tolist() == [round(each) for each in scheduler.timesteps.tolist()]
    assert grid.alpha[-1] == 1 and grid.sigma[-1] == 0
    torch.testing.assert_close(grid.alpha**2 + grid.sigma**2, torch.ones(num_steps + 1).double())


@pytest.mark.parametrize("sampler", [DpmSolver(**KARRAS), UniPc(**KARRAS)], ids=lambda each: each.type)
def test_karras_samples_match_diffusers(sampler: SpacedByNoise) -> None:
    torch.manual_seed(0)
    grid, noise, scheduler = (
        sampler.grid(Discrete()),
        torch.randn(2, 3, 4, 4).double(),
        scheduler_of_diffusers(sampler.type),
    )
    assert isinstance(grid, Grid)

    def x0(x: Tensor, t: float) -> Tensor:
        return 0.4 * x.tanh() + 1e-4 * t

    def denoiser(x: Tensor, i: int) -> Denoised:
        seen = x0(x, grid.time[i].item())
        return Denoised(seen, (x - grid.alpha[i].item() * seen) / grid.sigma[i].item())

    zeros = torch.zeros(2, dtype=torch.int64)
    found = sampler(denoiser, grid, noise, Streams(0, zeros, zeros))
    scheduler.set_timesteps(sampler.num_steps)
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(x0(x, t.item()), t, x, return_dict=False)[0]
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", EVERY, ids=lambda each: each.type)
def test_samplers_accept_karras_spacing_and_reject_other_processes(sampler: SpacedByNoise) -> None:
    plain = sampler.model_copy(update={"spacing": "time", "num_steps": "11"}).grid(Discrete())
    grid = sampler.grid(Discrete(rescale_timesteps=True, num_timesteps=4000, schedule=Cosine()))
    assert grid.num_steps == 11 and grid.time[0] == 999.75 and grid.time[-1] == 0
    spaced = sampler.grid(Discrete())
    torch.testing.assert_close(spaced.sigma[[0, -2, -1]], plain.sigma[[0, -2, -1]])
    assert not torch.allclose(spaced.sigma, plain.sigma, rtol=0.01)
    processes: list[Process] = [Continuous(), Flow(), Edm()]
    for process in processes:
        with pytest.raises(ValueError, match=f"karras, but the process is {process.type}: only discrete"):
            sampler.grid(process)
    with pytest.raises(ValueError, match="ends without any signal"):
        sampler.grid(Discrete(schedule=Jsd()))
    with pytest.raises(ValueError, match="takes a number of steps, at least 1; got 'ddim50'"):
        sampler.model_copy(update={"num_steps": "ddim50"}).grid(Discrete())


def test_churn_on_edm_rejects_settings_without_effect() -> None:
    for given, told in (({"spacing": "karras"}, "spacing is karras"), ({"shift": 3.0}, "shift is 3")):
        with pytest.raises(ValueError, match=told):
            Heun.model_validate({"s_churn": 30.0, "num_steps": 10} | given).grid(Edm())
