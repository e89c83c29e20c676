"""What a step is made of: flat parameters, optimizers, learning rates, averages, sums of gradients, means, alarms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.types import Losses
from image_diffusion.data.batches import Examples
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.distributed import World
from image_diffusion.training.ema import Averages, ExponentialEma, PowerEma, power_of_width, width_of_power
from image_diffusion.training.flat import Flat
from image_diffusion.training.gradients import Ordered, Shared
from image_diffusion.training.meter import Health, Meter
from image_diffusion.training.optimizer import Adam, AdamW
from image_diffusion.training.schedule import Constant, Cosine, Exponential, Linear

ALONE = World(0, 1, torch.device("cpu"))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(5 * 4 * 4, 2))


def inputs(count: int) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def examples(count: int) -> Examples:
    ids = torch.arange(count)
    return Examples(inputs(count), ids, ids, ids)


def test_flat_parameters_are_the_same_network() -> None:
    plain, flat = network(), network()
    laid = Flat(flat)
    assert torch.equal(plain(inputs(2)), flat(inputs(2)))
    flat(inputs(2)).sum().backward()
    plain(inputs(2)).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(laid.named(laid.gradient)[name], parameter.grad)
    assert laid.size % 16 == 0
    assert [name for name in laid.parameters if dict(plain.named_parameters())[name].ndim < 2] == [
        name for name, slot in zip(laid.parameters, laid.slots, strict=True) if slot.start >= laid.matrices_end
    ]


def test_flat_parameters_keep_channels_last() -> None:
    laid_out = network().to(memory_format=torch.channels_last)
    flat = Flat(laid_out)
    assert laid_out[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(flat.named(flat.values)["0.weight"], network()[0].weight)


def test_frozen_parameters_stay_out() -> None:
    partly = network()
    partly[0].requires_grad_(False)
    assert set(Flat(partly).parameters) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    with pytest.raises(ValueError, match="no trainable parameter"):
        Flat(network().requires_grad_(False))
    with pytest.raises(ValueError, match=r"0\.weight is torch\.float64"):
        Flat(network().double())


@pytest.mark.parametrize(
    "config",
    [Adam(lr=1e-2, betas=(0.8, 0.9)), AdamW(lr=1e-2, weight_decay=0.1), AdamW(weight_decay=0.1, decay_vectors=True)],
)
def test_optimizers_are_those_of_pytorch_on_the_plain_parameters(config: Adam | AdamW) -> None:
    plain, flat = network(), network()
    laid = Flat(flat)
    ours = config.build(laid)
    decay = config.weight_decay if isinstance(config, AdamW) else 0.0
    vectors = decay if isinstance(config, AdamW) and config.decay_vectors else 0.0
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": vectors},
    ]
    kind = torch.optim.AdamW if isinstance(config, AdamW) else torch.optim.Adam
    theirs = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for step in range(5):
        rate = ours.set_rate(1.0 / (step + 1))
        for group in theirs.param_groups:
            group["lr"] = rate
        for each in (plain, flat):
            each(inputs(4) * (step + 1)).square().mean().backward()
        ours.torch.step()
        theirs.step()
        theirs.zero_grad()
        laid.gradient.zero_()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(laid.named(laid.values)[name], parameter.detach(), rtol=1e-5, atol=1e-7)
    assert ours.steps.tolist() == [5.0, 5.0]


def test_schedules() -> None:
    assert [Linear().factor(step, 10) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert Linear(final=0.5).factor(10, 10) == 0.5
    assert [Constant(warmup_steps=4).factor(step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [round(Cosine().factor(step, 8), 12) for step in (0, 4, 8)] == [1.0, 0.5, 0.0]
    assert Exponential(decay=0.5, every_steps=100).factor(200, 1000) == 0.25


def test_widths_and_powers_of_averages_are_each_others_inverse() -> None:
    # Karras et al. 2024, section 3.1: sigma_rel 0.05 and 0.10 are gamma 16.97 and 6.94.
    assert power_of_width(0.05) == pytest.approx(16.97, abs=5e-3)
    assert power_of_width(0.10) == pytest.approx(6.94, abs=5e-3)
    for gamma in (0.5, 3.0, 40.0):
        assert power_of_width(width_of_power(gamma)) == pytest.approx(gamma, rel=1e-9)


def test_a_power_average_is_the_weighted_mean_of_its_definition() -> None:
    weights = torch.zeros(1)
    averages = Averages(PowerEma(widths=(0.1,)), weights)
    gamma, values = power_of_width(0.1), torch.randn(300, generator=torch.Generator().manual_seed(0))
    for step, value in enumerate(values, start=1):
        weights.fill_(value)
        averages.update(step)
    t = torch.arange(1, 301, dtype=torch.float64)
    expected = (values.double() * (t**gamma)).sum() / (t**gamma).sum()
    assert averages.vectors["ema-0.1"].item() == pytest.approx(expected.item(), abs=5e-3)


def test_several_averages_keep_their_own_rate() -> None:
    weights = torch.zeros(1)
    averages = Averages(ExponentialEma(rates=(0.5, 0.9)), weights)
    weights.fill_(1.0)
    averages.update(1)
    averages.update(2)
    assert [vector.item() for vector in averages.vectors.values()] == pytest.approx([0.75, 0.19])
    assert list(averages.vectors) == ["ema-0.5", "ema-0.9"]


@pytest.mark.parametrize("microbatch", [None, 1, 4, 7])
@pytest.mark.parametrize("strict", [False, True])
def test_the_gradient_is_that_of_the_mean_for_any_microbatch(microbatch: int | None, strict: bool) -> None:
    plain, cut = network(), network()
    flat = Flat(cut)
    plain(inputs(10)).square().sum(1).mean().backward()

    def losses_of(some: Examples, _: int) -> Losses:
        loss = cut(some.stored).square().sum(1)
        return Losses(loss, {"twice": 2 * loss.detach()})

    gradients = (
        Ordered(flat, ALONE, 10, microbatch or 10, lambda loss: loss)
        if strict
        else Shared(flat, ALONE, 10, microbatch, lambda loss: loss)
    )
    for _ in range(2):  # nothing of a step is left in the next
        losses = gradients(examples(10), losses_of)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(flat.named(flat.gradient)[name], parameter.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses.loss, plain(inputs(10)).square().sum(1).detach())
    torch.testing.assert_close(losses.parts["twice"], 2 * losses.loss)


def test_strict_refuses_more_processes_than_chunks() -> None:
    with pytest.raises(ValueError, match="3 processes cannot share 2 chunks of 8 examples. Use at most 2 processes"):
        Ordered(Flat(network()), World(0, 3, torch.device("cpu")), 16, 8, lambda loss: loss)


@pytest.mark.parametrize("conflict", [{"deterministic": "strict"}, {"precision": "fp16"}, {"channels_last": True}])
def test_sharding_refuses_what_does_not_go_with_it(conflict: dict[str, Any]) -> None:
    key, value = next(iter(conflict.items()))
    with pytest.raises(ValueError, match=f"sharding: full does not go with {key}: {str(value).lower()}"):
        TrainConfig.model_validate({"steps": 1, "sharding": "full", **conflict})
    assert TrainConfig.model_validate({"steps": 1, **conflict}).sharding == "none"


def test_means_by_quartile() -> None:
    meter = Meter(ALONE, strict=False)
    for start in (0.0, 1.0):
        loss = torch.tensor([1.0, 2.0, 3.0, 5.0]) + start
        time = torch.tensor([0.1, 0.3, 0.26, 0.99])
        meter.add(Losses(loss, {"mse": 2 * loss}, time), torch.tensor(4.0 + start))
    means = meter.take()
    assert means == {
        "loss": 3.25, "loss_q0": 1.5, "loss_q1": 3.0, "loss_q3": 5.5,
        "mse": 6.5, "mse_q0": 3.0, "mse_q1": 6.0, "mse_q3": 11.0,
        "grad_norm": 4.5,
    }  # fmt: skip
    assert meter.take() == {}


def test_a_norm_that_overflowed_is_left_out() -> None:
    meter = Meter(ALONE, strict=False)
    for norm in (1.0, math.inf, 3.0):
        meter.add(Losses(torch.ones(2), {}), torch.tensor(norm))
    assert meter.take() == {"loss": 1.0, "grad_norm": 2.0}


def test_a_meter_goes_on_from_its_state() -> None:
    whole, first = Meter(ALONE, strict=False), Meter(ALONE, strict=False)
    losses = [Losses(torch.rand(3), {"mse": torch.rand(3)}, torch.rand(3)) for _ in range(4)]
    for meter in (whole, first):
        for each in losses[:2]:
            meter.add(each, torch.tensor(1.0))
    second = Meter(ALONE, strict=False)
    second.load(first.state())
    for meter in (whole, second):
        for each in losses[2:]:
            meter.add(each, torch.tensor(2.0))
    assert whole.take() == second.take()


@pytest.mark.parametrize(
    ("losses", "norms", "message"),
    [
        ([1.0, 0.5, math.nan, 2.0], [1.0] * 4,
         "Loss is not finite at step 3 (rank 0). Last finite: 0.5 at step 2. Kept."),
        ([1.0, math.inf], [1.0] * 2, "Loss is not finite at step 2 (rank 0). Last finite: 1 at step 1. Kept."),
        ([1.0, 0.25, 3.0], [1.0, math.nan, math.nan],
         "Gradient is not finite at step 2 (rank 0). Last finite: 1 at step 1. Kept."),
        ([math.nan], [1.0], "Loss is not finite at step 1 (rank 0). No earlier step of this start was finite. Kept."),
    ],
)  # fmt: skip
def test_the_first_step_that_is_not_finite_is_named(losses: list[float], norms: list[float], message: str) -> None:
    health = Health(ALONE)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        health.watch(step, torch.tensor(loss), torch.tensor(norm), norm_may_overflow=False)
    with pytest.raises(ValueError) as error:
        health.check(lambda: "Kept.")
    assert str(error.value) == message


def test_an_overflow_is_no_alarm_where_steps_may_be_skipped() -> None:
    health = Health(ALONE)
    health.watch(1, torch.tensor(1.0), torch.tensor(math.inf), norm_may_overflow=True)
    health.check(lambda: "")


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 10, **changes})


@pytest.mark.parametrize(
    "change",
    [{"steps": 20}, {"microbatch": 4}, {"log_every_steps": 1}, {"max_hours": 1.0}, {"checkpoint": {"keep_last": 5}}],
)
def test_what_may_change_between_starts_is_no_part_of_the_identity(change: dict[str, Any]) -> None:
    assert settings(**change).identity() == settings().identity()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"global_batch": 8}, {"precision": "bf16"}, {"grad_clip": 1.0}, {"deterministic": "strict"},
     {"optimizer": {"type": "adam"}}, {"ema": {"type": "power"}}, {"flip_probability": 0.0}],
)  # fmt: skip
def test_what_decides_the_result_is_part_of_the_identity(change: dict[str, Any]) -> None:
    assert settings(**change).identity() != settings().identity()


@pytest.mark.parametrize("change", [{"weights": "ema"}, {"validate_every_steps": 5}, {"validation_samples": 5}])
def test_what_tells_the_best_is_part_of_the_identity_where_the_best_is_kept(change: dict[str, Any]) -> None:
    assert settings(**{"weights": "best"} | change).identity() != settings(weights="best").identity()


def test_the_length_counts_where_the_learning_rate_depends_on_it() -> None:
    short, long = (settings(steps=steps, schedule={"type": "cosine"}).identity() for steps in (10, 20))
    assert short != long


def test_an_average_is_needed_to_write_it() -> None:
    with pytest.raises(ValueError, match=r"weights is ema but ema\.rates is empty"):
        settings(ema={"type": "exponential", "rates": []})
    assert settings(ema={"type": "exponential", "rates": []}, weights="raw").ema.names == []
