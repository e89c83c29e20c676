"""Average velocities: their derivative, their closed form on Gaussian data, and samples in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams, image_streams, initial_noise
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.linear import derivative
from image_diffusion.objectives.flow_matching import MeanFlow
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.ode import FlowMap

MEAN, STD = 0.7, 0.5
SPEC = DataSpec(channels=1, resolution=2, num_classes=3)
DIT = {"depth": 2, "width": 128, "num_heads": 4, "patch": 2}


def exact(x: Tensor, t: Tensor, /, interval: Tensor | None = None, **cond: Tensor) -> Tensor:
    """The average velocity for x0 ~ N(MEAN, STD^2): (x_t - x_r) / (t - r) of the flow, which keeps (x - mean) / std."""
    t = t.view(-1, 1, 1, 1)
    r = t if interval is None else t - interval.view(-1, 1, 1, 1)
    std_t, std_r = (((1 - each) ** 2 * STD**2 + each**2).sqrt() for each in (t, r))
    return -MEAN + (STD**2 * (t + r - 2) + t + r) / (std_t * (std_t + std_r)) * (x - (1 - t) * MEAN)


def batch(count: int) -> Batch:
    streams = Streams(seed=3, epoch=torch.zeros(count, dtype=torch.int64), sample=torch.arange(count))
    x = MEAN + STD * streams.normal("x", (1, 2, 2))
    return Batch(x, {"label": torch.arange(count) % 3}, streams)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_exact_average_velocities_give_exact_samples_in_any_number_of_steps(num_steps: int) -> None:
    process, streams = Flow(shift=2.0), image_streams(torch.arange(16))
    sampler, noise = FlowMap(num_steps=num_steps), initial_noise(streams, (1, 2, 2))
    grid = sampler.grid(process)
    denoiser = NetworkDenoiser(exact, process.build(), grid, "velocity")
    torch.testing.assert_close(sampler(denoiser, grid, noise, streams), MEAN + STD * noise, rtol=0, atol=1e-6)


def test_target_is_the_average_velocity() -> None:
    """For the exact network u = v - (t - r) du/dt, so the error is the sample's velocity minus the mean velocity."""
    process, given = Flow().build(), batch(2000)
    config = MeanFlow(direction="predicted", interval_probability=1.0, weight_power=0.0)
    losses = config.build(process, SPEC)(exact, given)
    t = torch.stack([process.draw(given.streams, name) for name in ("timestep", "second_timestep")]).amax(0)
    noise, level = given.streams.normal("noise", (1, 2, 2)), t.float().view(-1, 1, 1, 1)
    left = noise - given.x - exact((1 - level) * given.x + level * noise, t.float())
    torch.testing.assert_close(losses.parts["mse"], left.square().flatten(1).mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.loss, 4 * losses.parts["mse"])


def test_target_along_the_sample_velocity_is_unbiased() -> None:
    """du/dt is linear in the direction, and the mean velocity given x_t is that of the flow: so is the mean target."""
    process, given = Flow().build(), batch(50_000)
    t, r = torch.full((50_000,), 0.8).double(), torch.full((50_000,), 0.3).double()
    noise = given.streams.normal("noise", (1, 2, 2))
    x_t = 0.2 * given.x + 0.8 * noise
    taught = MeanFlow().build(process, SPEC)._target(exact, x_t, r, t, noise - given.x, {})
    error = taught - exact(x_t, t.float(), (t - r).float())
    scale = (error.var() / error.numel()).sqrt()
    assert error.mean().abs() < 5 * scale and (error * x_t).mean().abs() < 5 * scale


def test_guided_target_is_used_unless_the_label_is_dropped() -> None:
    """The target at r = t is w v + (1 - w) u(no label)."""
    process, given = Flow().build(), batch(400)

    def network(x: Tensor, t: Tensor, /, label: Tensor, interval: Tensor | None = None) -> Tensor:
        return (label == 3).float().view(-1, 1, 1, 1).expand_as(x)

    config = MeanFlow(guidance_scale=3.0, label_drop_probability=0.3, interval_probability=1e-9)
    mse = config.build(process, SPEC)(network, given).parts["mse"]
    dropped = given.streams.event("label_drop", 0.3)
    v = given.streams.normal("noise", (1, 2, 2)) - given.x
    expected = torch.where(dropped.view(-1, 1, 1, 1), v - 1, 3 * v - 2)
    torch.testing.assert_close(mse, expected.square().flatten(1).mean(1))


def test_adaptive_loss_weight_is_not_used_in_validation() -> None:
    objective = MeanFlow().build(Flow().build(), SPEC)
    losses = objective(exact, batch(50))
    assert (losses.loss > 0.95).all() and (losses.loss <= 1).all()
    measured = objective.uniform()(exact, batch(50))
    torch.testing.assert_close(measured.loss, 4 * measured.parts["mse"])


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "norm": "rms_norm", "mlp": "swiglu"}])
def test_network_derivative_matches_central_differences(more: dict[str, Any]) -> None:
    """The shapes are large enough for the matrix products without a forward-mode derivative."""
    torch.manual_seed(0)
    network = DiTConfig(**DIT, **more).build(DataSpec(channels=4, resolution=16, num_classes=10), interval=True)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x, v, label = torch.randn(16, 4, 16, 16), torch.randn(16, 4, 16, 16), torch.arange(16) % 10
    t, interval, one = torch.rand(16), torch.rand(16), torch.ones(16)

    def u(x: Tensor, t: Tensor, interval: Tensor) -> Tensor:
        return network(x, t, label=label, interval=interval)

    found = derivative(u, (x, t, interval), (v, one, one))
    h = 1e-2
    with torch.no_grad():
        expected = (u(x + h * v, t + h, interval + h) - u(x - h * v, t - h, interval - h)) / (2 * h)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * expected.abs().max().item())
    assert u(x, t, interval).requires_grad  # the previous state is restored


def test_network_without_intervals_has_no_interval_weights() -> None:
    spec = DataSpec(channels=4, resolution=4)
    without, told = DiTConfig(**DIT).build(spec), DiTConfig(**DIT).build(spec, interval=True)
    more = set(told.state_dict()) - set(without.state_dict())
    assert more and all(name.startswith("interval_embedder.") for name in more)
    x, t = torch.randn(2, 4, 4, 4), torch.rand(2)
    assert torch.equal(told(x, t), told(x, t, interval=torch.zeros(2)))
    with pytest.raises(ValueError, match="was trained without intervals, which the sampler flow_map needs"):
        without(x, t, interval=t)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"type": "flow_matching"}},
            "sample.sampler.type is flow_map, but the network learns no average",
        ),
        ({"process": {"type": "discrete"}}, "Objective mean_flow needs the flow process"),
        (
            {"process": {"type": "discrete"}, "objective": {"type": "denoising"}},
            "flow_map sampler needs average velocities, and the process discrete",
        ),
        ({"guidance": {"guidance_scale": 2.0}}, "cannot be guided afterwards. Use 1, and set system.objective.guid"),
        (
            {"sweep": {"guidance_scale": [1, 3]}},
            "sweep.guidance_scale 3: sample.guidance.guidance_scale is 3, but avera",
        ),
        ({"type": "iddpm"}, "the network of the system iddpm takes no intervals. Use the system dit"),
        ({"objective": {"type": "mean_flow", "guidance_scale": 2.0}}, "the network never learns to do without a label"),
    ],
)
def test_incompatible_mean_flow_settings_are_rejected_before_any_work(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    system = {"type": "dit", "process": {"type": "flow"}, "objective": {"type": "mean_flow"}} | changes
    more = {"network": DIT} if system["type"] == "dit" else {}
    written = {
        "data": {"name": "d", "source": {"type": "digits"}, "resolution": 32},
        "system": {k: v for k, v in system.items() if k not in ("guidance", "sweep")} | more,
        "train": {"steps": 10, "global_batch": 4, "grid_every_steps": None},
        "sample": {"sampler": {"type": "flow_map"}, "guidance": system.get("guidance", {})},
        "sweep": system.get("sweep", {}),
    }
    (tmp_path / "x.yaml").write_text(json.dumps(written))
    with pytest.raises(ValueError) as told:
        load_all([tmp_path / "x.yaml"])
    assert message in str(told.value) and len(str(told.value).splitlines()) == 1


def test_mean_flow_requires_the_flow_process() -> None:
    with pytest.raises(ValueError, match=r"mean_flow needs the flow process\. Set process\.type to flow"):
        MeanFlow().build(Discrete().build(), SPEC)


def test_exact_network_has_no_error_with_an_exact_teacher() -> None:
    """Distilled from the exact flow, the exact map is the fixed point for every sample, not only on average."""
    objective = MeanFlow(direction="teacher", interval_probability=1.0, weight_power=0.0).build(Flow().build(), SPEC)
    assert objective.teacher is not None
    objective.teacher.network = exact
    losses = objective(exact, batch(500))
    assert losses.loss.max() < 1e-8


class Zeros(torch.nn.Module):
    def forward(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        return torch.zeros_like(x)


def test_guidance_uses_the_teacher_instead_of_the_network() -> None:
    def teacher(x: Tensor, t: Tensor, /, label: Tensor, interval: Tensor | None = None) -> Tensor:
        return (label + 1).float().view(-1, 1, 1, 1).expand_as(x)

    config = MeanFlow(direction="teacher", guidance_scale=3.0, label_drop_probability=0.3, interval_probability=1e-9)
    objective, given = config.build(Flow().build(), SPEC), batch(400)
    objective.teacher.network = teacher
    mse = objective(lambda x, t, **cond: torch.zeros_like(x), given).parts["mse"]
    dropped = given.streams.event("label_drop", 0.3)
    told = (given.cond["label"] + 1).float()
    torch.testing.assert_close(mse, torch.where(dropped, torch.tensor(4.0), 3 * told - 2 * 4).square())
    torch.testing.assert_close(objective(Zeros().eval(), given).parts["mse"], (3 * told - 2 * 4).square())


def test_intervals_have_no_effect_at_initialisation() -> None:
    torch.manual_seed(0)
    network = DiTConfig(**DIT).build(DataSpec(channels=4, resolution=16, num_classes=10), interval=True)
    for name, parameter in network.named_parameters():
        if not name.startswith("interval_embedder"):
            torch.nn.init.normal_(parameter, std=0.05)
    x, t, label = torch.randn(2, 4, 16, 16), torch.rand(2), torch.arange(2)
    assert torch.equal(network(x, t, label=label, interval=t), network(x, t, label=label))


def test_steps_match_the_diffusers_scheduler() -> None:
    from diffusers import FlowMapEulerDiscreteScheduler

    process, streams = Flow(shift=3.0, time_scale=1000), image_streams(torch.arange(4))
    sampler, noise = FlowMap(num_steps=4), initial_noise(streams, (1, 2, 2))
    grid = sampler.grid(process)
    ours = sampler(NetworkDenoiser(_slow, process.build(), grid, "velocity"), grid, noise, streams)
    scheduler = FlowMapEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    scheduler.set_timesteps(4)
    x, ends = noise, [*scheduler.timesteps[1:], torch.zeros((), dtype=torch.float64)]
    for t, r in zip(scheduler.timesteps, ends, strict=True):
        x = scheduler.step(_slow(x, t.expand(4), interval=(t - r).expand(4)), t, x).prev_sample
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-5)


def _slow(x: Tensor, t: Tensor, /, interval: Tensor | None = None, **cond: Tensor) -> Tensor:
    """The exact network, with times scaled to 1,000."""
    assert interval is not None
    return exact(x, t.float() / 1000, interval=interval.float() / 1000)
