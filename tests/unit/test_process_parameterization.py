"""Parameterizations of the network output, and the network as a denoiser."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from image_diffusion.process import Continuous, Discrete, Flow
from image_diffusion.process.denoiser import (
    LEARNED_VARIANCES,
    NetworkDenoiser,
    clamp,
    log_variance,
    read_output,
    split_output,
    target,
    to_x0_and_eps,
)
from image_diffusion.process.likelihood import bits_per_dim

NUMBERS = st.lists(st.floats(-3, 3), min_size=8, max_size=8)
LEVELS = st.tuples(st.floats(0.05, 2), st.floats(0.05, 2))


@settings(max_examples=80, deadline=None)
@given(NUMBERS, NUMBERS, LEVELS, st.sampled_from(["eps", "x0", "v", "velocity"]))
def test_targets_convert_back_to_x0_and_eps(
    x0: list[float], eps: list[float], levels: tuple[float, float], prediction: str
) -> None:
    """For any levels, on the unit circle or off it."""
    clean, noise = torch.tensor(x0).double(), torch.tensor(eps).double()
    alpha, sigma = torch.tensor(levels).double()
    output = target(prediction, clean, noise, alpha, sigma)
    read = to_x0_and_eps(prediction, output, alpha * clean + sigma * noise, alpha, sigma)
    torch.testing.assert_close(read, (clean, noise), rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(0, 999), st.sampled_from(["eps", "x0", "v", "velocity", "previous_x"]))
def test_x0_and_eps_are_consistent_with_x_t_for_every_prediction(
    output: list[float], x_t: list[float], t: int, prediction: str
) -> None:
    noisy, said = torch.tensor(x_t).double().view(1, -1), torch.tensor(output).double().view(1, -1)
    step = Discrete().build().steps.at(torch.tensor([t]), noisy)
    for restrict in (None, clamp):
        denoised = read_output(said, noisy, step, prediction, "fixed_small", restrict)
        torch.testing.assert_close(step.alpha * denoised.x0 + step.sigma * denoised.eps, noisy, rtol=1e-6, atol=1e-6)
        if prediction == "previous_x":
            assert torch.equal(step.reverse_mean(denoised, noisy), said)


def test_previous_x_converts_back_to_x0() -> None:
    x0, x_t = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    step = Discrete().build().steps.at(torch.tensor([0, 1, 10, 500, 999]), x_t)
    denoised = read_output(step.posterior_mean(x0, x_t), x_t, step, "previous_x", "fixed_large")
    torch.testing.assert_close(denoised.x0, x0, rtol=1e-6, atol=1e-6)


def test_learned_range_lies_between_the_fixed_variances() -> None:
    x = torch.zeros(3, 1).double()
    step = Discrete().build().steps.at(torch.tensor([1, 200, 999]), x)
    torch.testing.assert_close(log_variance(x - 1, "learned_range", step), step.log_variance)
    torch.testing.assert_close(log_variance(x + 1, "learned_range", step), step.log_large_variance)
    assert torch.equal(log_variance(x, "learned", step), x)


@pytest.mark.parametrize(
    ("channels", "variance", "message"),
    [
        (4, "learned_range", "returns 4 channels for x of 4, but variance learned_range needs 8"),
        (8, "fixed_large", "returns 8 channels for x of 4, but variance fixed_large needs 4"),
        (6, "learned", "Build the network with 8 output channels, or set variance to fixed_small or fixed_large."),
    ],
)
def test_the_channels_must_fit_the_variance(channels: int, variance: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_output(torch.zeros(2, channels, 3, 3), 4, variance)
    expected = 8 if variance in LEARNED_VARIANCES else 4
    assert split_output(torch.zeros(2, expected, 3, 3), 4, variance)[0].shape[1] == 4


@pytest.mark.parametrize("config", [Discrete(), Continuous(), Continuous(scale=0.5), Flow(time_scale=1000.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_perfect_network_denoises_perfectly_at_every_point(
    config: Discrete | Continuous | Flow, dtype: object
) -> None:
    process = config.build()
    grid = process.grid(20)
    x0, eps = torch.rand(3, 2, 4, 4, dtype=dtype) * 2 - 1, torch.randn(3, 2, 4, 4, dtype=dtype)
    calls: list[Tensor] = []

    def network(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        assert label.tolist() == [0, 1, 2]
        calls.append(t)
        return eps - x0

    denoiser = NetworkDenoiser(network, process, grid, "velocity", cond={"label": torch.arange(3)}, restrict=clamp)
    for i in range(grid.num_steps):
        denoised = denoiser((grid.alpha[i] * x0 + grid.sigma[i] * eps).to(dtype), i)
        torch.testing.assert_close(denoised.x0, x0, rtol=1e-4, atol=1e-4)
        assert denoised.x0.dtype == dtype and denoised.log_variance is None
        assert calls[-1].shape == (3,) and calls[-1].dtype == dtype and calls[-1][0] == grid.time[i].to(dtype)


def test_network_time_is_on_the_device_of_the_input() -> None:
    seen: list[Tensor] = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        seen.extend((x, t))
        return x

    process = Discrete().build()
    NetworkDenoiser(network, process, process.grid(4), "x0")(torch.zeros(2, 3, 4, 4, device="meta"), 0)
    assert [each.device.type for each in seen] == ["meta", "meta"]


def test_network_input_has_unit_variance_if_the_scale_is_below_one() -> None:
    x = torch.randn(4, 3, 8, 8) * torch.tensor([0.1, 0.5, 1, 3]).view(-1, 1, 1, 1)
    seen = Continuous(scale=0.5).build().network_input(x)
    torch.testing.assert_close(seen.flatten(1).std(1, correction=0), torch.ones(4))
    assert Continuous().build().network_input(x) is x
    assert Continuous(scale=0.5).build().network_input(torch.zeros(1, 1, 2, 2)).isfinite().all()


def test_perfect_denoiser_has_a_lower_bound_than_an_inaccurate_one() -> None:
    process = Discrete(num_timesteps=100).build()
    grid, x0 = process.grid(), torch.randint(0, 256, (2, 3, 4, 4)).double() / 127.5 - 1
    eps = torch.randn(2, 3, 4, 4).double()

    def bound(error: float) -> Tensor:
        denoiser = NetworkDenoiser(lambda x, t: x0 + error, process, grid, "x0")
        return bits_per_dim(denoiser, grid, x0, lambda i: eps, variance="fixed_large").total

    assert (bound(0.0) < bound(0.3)).all() and (bound(0.0) < 8).all()
