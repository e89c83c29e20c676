"""Flow matching with a prediction type that differs from its loss type."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import image_streams
from image_diffusion.core.types import DataSpec
from image_diffusion.objectives.flow_matching import FlowMatching, FlowMatchingObjective, Said
from image_diffusion.process.denoiser import target, to_x0_and_eps
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.ode import Heun
from image_diffusion.systems.diffusion.generator import Reading
from image_diffusion.training.config import TrainConfig
from trained_digits import train

SAID: tuple[Said, ...] = get_args(Said)
SPEC = DataSpec(channels=2, resolution=3)
X, NOISE = torch.randn(2, 5, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TIMES = torch.tensor([0.1, 0.3, 0.5, 0.8, 0.9], dtype=torch.float64)


def objective(**keys: object) -> FlowMatchingObjective:
    return FlowMatching(**keys).build(Flow().build(), SPEC)  # type: ignore[arg-type]


def test_velocity_loss_weights_x0_errors_by_inverse_squared_time() -> None:
    """JiT's v-loss, with its t and 1 - t exchanged: (x - x') / max(t, 0.05), squared."""
    times = torch.tensor([0.0, 0.02, 0.05, 0.1, 1.0], dtype=torch.float64)
    losses = objective(prediction="x0").losses_at(lambda x, t: X + 0.3, X, times, NOISE, {})
    torch.testing.assert_close(losses.loss, 0.09 / times.clamp(min=0.05).square())
    assert torch.equal(losses.loss, losses.parts["mse"])
    halved = objective(prediction="x0", min_time=0.1).losses_at(lambda x, t: X + 0.3, X, times, NOISE, {})
    torch.testing.assert_close(halved.loss, 0.09 / times.clamp(min=0.1).square())


@pytest.mark.parametrize("loss", SAID)
def test_loss_and_gradient_do_not_depend_on_the_prediction_type(loss: Said) -> None:
    """The output of one network, converted at its x_t to each prediction type."""
    weight = torch.full((1,), 0.7, dtype=torch.float64, requires_grad=True)
    levels = ((1 - TIMES).view(-1, 1, 1, 1), TIMES.view(-1, 1, 1, 1))

    def found(said: Said) -> tuple[Tensor, Tensor]:
        def network(x: Tensor, t: Tensor) -> Tensor:
            x0, eps = to_x0_and_eps("velocity", (weight * x).tanh(), x, *levels)
            return target(said, x0, eps, *levels)

        value = objective(prediction=said, loss=loss).losses_at(network, X, TIMES, NOISE, {}).loss
        return value.detach(), torch.autograd.grad(value.mean(), weight)[0]

    for said in SAID:
        torch.testing.assert_close(found(said), found("velocity"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("said", "loss"), list(product(SAID, SAID)))
def test_every_loss_is_finite_at_both_ends_of_the_path(said: Said, loss: Said) -> None:
    ends = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    losses = objective(prediction=said, loss=loss).losses_at(lambda x, t: x, X, ends, NOISE, {})
    assert losses.loss.isfinite().all()


def test_samples_of_exact_networks_do_not_depend_on_the_prediction_type() -> None:
    """For data N(0, 0.25), E[x0 | x_t] is known; every prediction is converted from it."""
    process, noise = Flow(), torch.randn(64, 1, 1, 1, dtype=torch.float64)
    sampler = Heun(num_steps=20)
    grid = sampler.grid(process)

    def samples(said: Said) -> Tensor:
        def network(x: Tensor, t: Tensor) -> Tensor:
            t = t.view(-1, 1, 1, 1)
            alpha, sigma = 1 - t, t
            x0 = 0.25 * alpha / (0.25 * alpha**2 + sigma**2) * x
            return target(said, x0, (x - alpha * x0) / sigma, alpha, sigma)

        reading = Reading(process=process, prediction=said, variance="fixed_small", drops_labels=False)
        denoiser = reading.denoiser(network, grid, {}, lambda each: each)
        return sampler(denoiser, grid, noise, image_streams(torch.arange(64)))

    expected = samples("velocity")
    assert expected.std().item() == pytest.approx(0.5, rel=0.2)
    for said in SAID:
        torch.testing.assert_close(samples(said), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_predicting_x0_learns_large_patches_where_velocity_is_slow_and_eps_fails() -> None:
    """Four patches of 256 numbers in a network of 128 channels. Longer trainings: tests/bench/bench_predictions.py."""

    def error(prediction: Said, loss: Said) -> float:
        keys = {"prediction": prediction, "loss": loss, "label_drop_probability": 0.1}
        return train(80, 32, num_samples=50, objective={"type": "flow_matching", **keys}).error

    x0, velocity, eps = error("x0", "velocity"), error("velocity", "velocity"), error("eps", "eps")
    assert x0 < 0.5 * velocity and velocity < 0.75 * eps


@pytest.mark.parametrize("said", ["velocity", "x0"])
def test_contrastive_loss_has_its_closed_form_minimum(said: Said) -> None:
    """A network that predicts the velocity u everywhere has its minimum at
    (mean of velocities - lambda mean of negatives) / (1 - lambda)."""
    x, noise, times = X[:4], NOISE[:4], TIMES[:4]
    velocity, weight = noise - x, 0.2
    u = ((velocity - weight * velocity[[1, 0, 3, 2]]).mean(0) / (1 - weight)).requires_grad_()

    def network(x_t: Tensor, t: Tensor) -> Tensor:
        return u.expand(4, 2, 3, 3) if said == "velocity" else x_t - t.view(-1, 1, 1, 1) * u

    trained = objective(prediction=said, contrastive=weight)
    losses = trained.losses_at(network, x, times, noise, {})
    torch.testing.assert_close(torch.autograd.grad(losses.loss.mean(), u)[0], torch.zeros_like(u), atol=1e-7, rtol=0)
    torch.testing.assert_close(losses.loss, sum(losses.parts.values()))
    assert trained.pairs_samples and not trained.uniform().pairs_samples


def test_contrastive_pairs_are_the_same_in_even_parts_of_a_batch() -> None:
    """So a step does not depend on processes and microbatches, if they split no pair."""
    whole = objective(contrastive=0.1)
    x, noise = torch.randn(2, 8, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    times = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)

    def losses(rows: slice) -> Tensor:
        return whole.losses_at(lambda x_t, t: 0.3 * x_t, x[rows], times[rows], noise[rows], {}).loss

    expected = losses(slice(0, 8))
    torch.testing.assert_close(torch.cat([losses(slice(0, 2)), losses(slice(2, 6)), losses(slice(6, 8))]), expected)


@pytest.mark.parametrize(
    ("processes", "changes", "found"),
    [
        (1, {"global_batch": 5}, "train.global_batch is 5"),
        (2, {"global_batch": 6}, "the share of process 0 is 3"),
        (1, {"global_batch": 6, "microbatch": 3}, "train.microbatch is 3"),
        (2, {"global_batch": 6, "deterministic": "strict", "strict_chunk": 3}, "train.strict_chunk is 3"),
    ],
)
def test_odd_batches_that_split_pairs_are_rejected(processes: int, changes: dict[str, object], found: str) -> None:
    with pytest.raises(ValueError, match=f"pairs the samples of a batch, but {found}, an odd number"):
        TrainConfig(steps=1, **changes).check_pairs(processes)  # type: ignore[arg-type]
    TrainConfig(steps=1, global_batch=4 * processes, microbatch=2).check_pairs(processes)
