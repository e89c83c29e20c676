"""Parts of a training step: flat parameters, optimizers, schedules, averages, gradients, meters, health checks."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.training.checkpoint.manager import State
from image_diffusion.training.config import CheckpointConfig, TrainConfig
from image_diffusion.training.monitor.meter import Health, Meter, Patience, Speed
from image_diffusion.training.monitor.reports import Reports, _at
from image_diffusion.training.optim.adam import Adam, AdamW
from image_diffusion.training.optim.ema import (
    Averages,
    ExponentialEma,
    PowerEma,
    RampUp,
    Warmup,
    power_of_width,
    width_of_power,
)
from image_diffusion.training.optim.numerics import Precision
from image_diffusion.training.optim.schedule import Constant, Cosine, Exponential, Linear, Power, Wsd
from image_diffusion.training.parallel import flat_parameters as flat_vectors
from image_diffusion.training.parallel import world as distributed
from image_diffusion.training.parallel.flat_parameters import Flat
from image_diffusion.training.parallel.gradients import OrderedGradient, SharedGradient, shares
from image_diffusion.training.parallel.world import World
from image_diffusion.training.parallel.zero import SlicedFlat
from image_diffusion.training.trainer import Trainer

ALONE = World(0, 1, torch.device("cpu"))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(5 * 4 * 4, 2))


def inputs(count: int) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def examples(count: int) -> Examples:
    ids = torch.arange(count)
    return Examples(inputs(count), ids, ids, ids)


def test_flat_parameters_give_the_same_network() -> None:
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


def test_frozen_parameters_are_left_out() -> None:
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
def test_optimizers_match_pytorch_on_unflattened_parameters(config: Adam | AdamW) -> None:
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
    half = Cosine(final=0.2, warmup_steps=2)  # 0.2 + 0.8 (1 + cos(pi step / 8)) / 2, halved in the first step
    root = math.sqrt(0.5)
    expected = [0.5, 0.6 + 0.4 * root, 0.6, 0.6 - 0.4 * root, 0.2, 0.2]
    assert [half.factor(step, 8) for step in (0, 2, 4, 6, 8, 9)] == pytest.approx(expected)
    assert [Linear(final=0.2).factor(step, 8) for step in (0, 2, 8, 9)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    assert Exponential(decay=0.5, every_steps=100).factor(200, 1000) == 0.25
    wsd = [Wsd(warmup_steps=2, decay_fraction=0.4, final=0.1, shape="linear").factor(step, 10) for step in range(12)]
    assert wsd == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1])
    root = [Wsd(decay_fraction=0.4).factor(step, 10) for step in (6, 7, 10)]
    assert root == pytest.approx([1.0, 0.5, 0.0])  # a quarter of the decay halves the rate
    power = Power(constant_steps=100, warmup_steps=10)
    assert [power.factor(step, 1) for step in (4, 100, 400, 2500)] == pytest.approx([0.5, 1.0, 0.5, 0.2])
    assert Power(constant_steps=10, exponent=1).factor(40, 1) == 0.25


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


def test_averages_use_their_own_rates() -> None:
    weights = torch.zeros(1)
    averages = Averages(ExponentialEma(rates=(0.5, 0.9)), weights)
    weights.fill_(1.0)
    averages.update(1)
    averages.update(2)
    assert [vector.item() for vector in averages.vectors.values()] == pytest.approx([0.75, 0.19])
    assert list(averages.vectors) == ["ema-0.5", "ema-0.9"]


def test_widths_with_equal_names_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"name an average twice: ema-0\.05, ema-0\.05\. Give each once"):
        PowerEma(widths=(0.05, 0.05 + 1e-12))


def held(config: ExponentialEma | PowerEma, steps: int) -> list[float]:
    """Return the share of the initial weights in each average: initial weights are one, all later ones zero."""
    weights = torch.ones(1, dtype=torch.float64)
    averages = Averages(config, weights)
    weights.zero_()
    for step in range(1, steps + 1):
        averages.update(step)
    return [vector.item() for vector in averages.vectors.values()]


@pytest.mark.parametrize("steps", [1, 2, 30, 301])
@pytest.mark.parametrize("every", [1, 10])
def test_initial_share_predicts_the_weight_of_the_initial_weights(steps: int, every: int) -> None:
    config = ExponentialEma(rates=(0.9, 0.999), update_every=every)
    assert [config.initial_share(name, steps) for name in config.names] == pytest.approx(held(config, steps))
    for warmup in (Warmup(), RampUp(), RampUp(ratio=0.2)):
        warm = ExponentialEma(rates=(0.9, 0.999), update_every=every, warmup=warmup)
        assert held(warm, max(steps, 2)) == pytest.approx([0.0, 0.0], abs=0.04)
        assert warm.initial_share("ema-0.999", steps) == 0.0
    assert held(PowerEma(), steps) == [0.0, 0.0]


def test_a_ramp_up_averages_over_a_share_of_the_training() -> None:
    """After t steps half of the average is from the last 0.05 t steps, until the half-life of the rate is shorter."""
    warmup = RampUp()
    for step in (20, 1000, 10**6):
        assert warmup.decay(step, 1 - 1e-12) ** (0.05 * step) == pytest.approx(0.5)
        assert warmup.decay(step, 1 - 1e-12, every=10) ** (0.005 * step) == pytest.approx(0.5)
    assert warmup.decay(10**6, 0.99) == 0.99
    for steps in (100, 10_000):  # for any length
        late = torch.zeros(1, dtype=torch.float64)
        averages = Averages(ExponentialEma(rates=(0.99999,), warmup=warmup), late)
        for step in range(1, steps + 1):
            late.fill_(float(step > 0.95 * steps))
            averages.update(step)
        (average,) = averages.vectors.values()
        assert average.item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("steps", "every", "rate"),
    [(300, 1, 0.99), (3000, 1, 0.999), (20_000, 1, 0.9998), (20_000, 10, 0.998), (5, 1, 0.5)],
)
def test_fitting_rate_leaves_at_most_5_percent_of_the_initial_weights(steps: int, every: int, rate: float) -> None:
    config = ExponentialEma(update_every=every)
    assert config.fitting_rate(steps, 0.05) == rate
    fitting = ExponentialEma(rates=(rate,), update_every=every)
    assert fitting.initial_share(fitting.names[0], steps) <= 0.05


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"steps": 300}, None),  # default warmup: ramp_up
        ({"steps": 300, "ema": {"type": "exponential", "warmup": None}},
         "After 300 steps 97% of the initial weights are still in the average ema-0.9999. Take "
         "train.ema.rates: [0.99] or less, or train.ema.warmup: {type: ramp_up}."),
        ({"steps": 2, "ema": {"type": "exponential", "update_every": 9, "warmup": None}},
         "After 2 steps 100% of the initial weights are still in the average ema-0.9999. Take "
         "train.ema.warmup: {type: ramp_up}."),
        ({"steps": 29_956, "ema": {"type": "exponential", "warmup": None}}, None),
        ({"steps": 29_955, "ema": {"type": "exponential", "warmup": None}}, "After 29,955 steps 5% of the"),
        ({"steps": 300, "weights": "raw"}, None),
        ({"steps": 300, "ema": {"type": "power"}}, None),
        ({"steps": 300, "ema": {"type": "exponential", "warmup": {"type": "ramp_up"}}}, None),
        ({"steps": 300, "ema": {"type": "exponential", "rates": [0.9999, 0.9], "warmup": None}, "weights": 0.9}, None),
        ({"steps": 300, "ema": {"type": "exponential", "rates": [0.9, 0.9999], "warmup": None},
          "weights": 0.9999}, "After 300 "),
    ],
)  # fmt: skip
def test_averages_dominated_by_initial_weights_cause_a_warning(changes: dict[str, Any], warned: str | None) -> None:
    advice = settings(**changes).advice()
    assert advice == [] if warned is None else len(advice) == 1 and advice[0].startswith(warned)


@pytest.mark.parametrize("microbatch", [None, 1, 4, 7])
@pytest.mark.parametrize("strict", [False, True])
def test_gradient_is_that_of_the_mean_loss_for_any_microbatch(microbatch: int | None, strict: bool) -> None:
    plain, cut = network(), network()
    flat = Flat(cut)
    plain(inputs(10)).square().sum(1).mean().backward()

    def losses_of(some: Examples, _: int) -> Losses:
        loss = cut(some.stored).square().sum(1)
        return Losses(loss, {"twice": 2 * loss.detach()})

    gradients = (
        OrderedGradient(flat, ALONE, 10, microbatch or 10, lambda loss: loss)
        if strict
        else SharedGradient(flat, ALONE, 10, microbatch, lambda loss: loss)
    )
    for _ in range(2):  # the second step does not include the first
        losses = gradients(examples(10), losses_of)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(flat.named(flat.gradient)[name], parameter.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses.loss, plain(inputs(10)).square().sum(1).detach())
    torch.testing.assert_close(losses.parts["twice"], 2 * losses.loss)


def test_strict_mode_sends_twice_the_gradient_for_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one chunk per process, a process sends each other process that one's share of its gradient, and then its
    share of the sum."""
    sent: list[int] = []
    monkeypatch.setattr(distributed.dist, "all_to_all_single", lambda into, rows: sent.append(rows.nbytes))
    monkeypatch.setattr(distributed.dist, "all_gather_into_tensor", lambda into, rows, group: sent.append(into.nbytes))
    cut = network()
    flat = Flat(cut)
    for processes in (2, 8, 40):
        sent.clear()
        world = World(0, processes, torch.device("cpu"))
        ordered = OrderedGradient(flat, world, processes, 1, lambda loss: loss)
        ordered(examples(processes), lambda some, _: Losses(cut(some.stored).sum(1), {}))
        most = sorted(sent)[-2:]  # the others are losses
        assert sum(most) <= 2 * (flat.gradient.nbytes + 4 * processes)
    OrderedGradient(flat, World(0, 3, torch.device("cpu")), 16, 8, lambda loss: loss)
    assert "3 processes share 2 chunks of 8 examples, so that 1 have nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    "conflict",
    [{"deterministic": "strict"}, {"precision": "fp16"}, {"channels_last": True}, {"compile": "cuda_graphs"}],
)
def test_sharding_rejects_incompatible_settings(conflict: dict[str, Any]) -> None:
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


def test_overflowed_gradient_norms_are_left_out() -> None:
    meter = Meter(ALONE, strict=False)
    for norm in (1.0, math.inf, 3.0):
        meter.add(Losses(torch.ones(2), {}), torch.tensor(norm))
    assert meter.take() == {"loss": 1.0, "grad_norm": 2.0}


def test_meter_resumes_from_its_state() -> None:
    whole, first = Meter(ALONE, strict=False), Meter(ALONE, strict=False)
    losses = [Losses(torch.rand(3), {"mse": torch.rand(3)}, torch.rand(3)) for _ in range(4)]
    for meter in (whole, first):
        for each in losses[:2]:
            meter.add(each, torch.tensor(1.0))
    second = Meter(ALONE, strict=False)
    second.load_state_dict(first.state_dict())
    for meter in (whole, second):
        for each in losses[2:]:
            meter.add(each, torch.tensor(2.0))
    assert whole.take() == second.take()


def test_loss_parts_are_means_over_examples_that_have_them() -> None:
    meter = Meter(ALONE, strict=False)
    for parts in ({}, {"adversarial": torch.tensor([2.0, 4.0])}, {}):
        meter.add(Losses(torch.ones(2), parts, torch.tensor([0.1, 0.9])), torch.tensor(1.0))
    means = meter.take()
    assert (means["loss"], means["loss_q3"]) == (1.0, 1.0)
    assert (means["adversarial"], means["adversarial_q0"], means["adversarial_q3"]) == (3.0, 2.0, 4.0)


def test_meter_loads_checkpoints_of_the_old_format() -> None:
    """The old format has one count for all sums."""
    meter = Meter(ALONE, strict=False)
    count, norm = torch.tensor([[4.0, 4.0, 0.0, 0.0, 0.0]]).double(), torch.tensor([[2.0, 1.0]]).double()
    meter.load_state_dict({"count": count, "loss": 3 * count, "mse": 2 * count, "norm": norm})
    meter.add(Losses(torch.ones(4), {"mse": torch.zeros(4)}, torch.zeros(4)), torch.tensor(2.0))
    assert meter.take() == {"loss": 2.0, "loss_q0": 2.0, "mse": 1.0, "mse_q0": 1.0, "grad_norm": 2.0}


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


def test_gradient_overflow_is_allowed_where_steps_may_be_skipped() -> None:
    health = Health(ALONE)
    health.watch(1, torch.tensor(1.0), torch.tensor(math.inf), norm_may_overflow=True)
    health.check(lambda: "")


def test_gradient_not_finite_at_any_loss_scale_is_an_error() -> None:
    weight, precision = nn.Parameter(torch.zeros(1)), Precision("fp16", ALONE.device)
    sgd = torch.optim.SGD([weight])
    trainer = SimpleNamespace(health=Health(ALONE), precision=precision)
    reports: Any = SimpleNamespace(_state=SimpleNamespace(wait=lambda: None, advice="Kept."), _trainer=trainer)
    for _ in range(57):  # from 2^16
        assert Reports._check_health(reports) == [0.0]
        precision.scaler.scale((weight * 0).sqrt()).backward()  # 0, with the gradient NaN
        precision.scaler.step(sgd)
        precision.scaler.update()
    told = r"not finite at any loss scale: fp16 has lowered it to 4.5e-13. Kept. Set train.precision to bf16 or float32"
    with pytest.raises(ValueError, match=told):
        Reports._check_health(reports)


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 10, **changes})


@pytest.mark.parametrize(
    "change",
    [{"steps": 20}, {"microbatch": 4}, {"log_every_steps": 1}, {"max_hours": 1.0}, {"checkpoint": {"keep_last": 5}},
     {"weights": "raw"}, {"weights": 0.9999}, {"compile": "cuda_graphs"}],
)  # fmt: skip
def test_settings_that_may_change_on_resume_are_not_part_of_the_identity(change: dict[str, Any]) -> None:
    assert settings(**change).identity() == settings().identity()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"global_batch": 8}, {"precision": "bf16"}, {"grad_clip": 1.0}, {"deterministic": "strict"},
     {"optimizer": {"type": "adam"}}, {"ema": {"type": "power"}}, {"flip_probability": 0.0},
     {"balance_classes": True}, {"augment": {}}],
)  # fmt: skip
def test_settings_that_determine_the_result_are_part_of_the_identity(change: dict[str, Any]) -> None:
    assert settings(**change).identity() != settings().identity()


@pytest.mark.parametrize("change", [{"weights": "ema"}, {"validate_every_steps": 5}, {"validation_samples": 5}])
def test_validation_settings_are_part_of_the_identity_with_best_weights(change: dict[str, Any]) -> None:
    assert settings(**{"weights": "best"} | change).identity() != settings(weights="best").identity()


@pytest.mark.parametrize(
    "change",
    [{"patience": None}, {"patience": 0.3}, {"steps": 20}, {"validate_every_steps": 5}, {"validation_samples": 5},
     {"weights": "raw"}],
)  # fmt: skip
def test_early_stopping_settings_are_part_of_the_identity(change: dict[str, Any]) -> None:
    assert settings(**{"patience": 0.2} | change).identity() != settings(patience=0.2).identity()


def test_patience_counts_its_share_of_steps_exactly() -> None:
    patience = Patience(100, 0.07)
    for step in range(1, 8):
        patience.observe(step, float(step))
    assert (patience.step, patience.ended_at) == (1, None)
    patience.observe(8, 1.0)
    assert patience.ended_at == 8 and 0.07 * 100 > 7
    other = Patience(30, None)
    for step in range(1, 30):
        other.observe(step, float(step))
    assert other.ended_at is None and other.state_dict() == {}


def test_unset_patience_is_not_written_to_files() -> None:
    assert "patience" not in dump(settings()) and dump(settings(patience=0.2))["patience"] == 0.2


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_length_is_part_of_the_identity_where_the_schedule_depends_on_it(schedule: str) -> None:
    short, long = (settings(steps=steps, schedule={"type": schedule}).identity() for steps in (10, 20))
    assert short != long


def test_writing_an_average_needs_an_average() -> None:
    with pytest.raises(ValueError, match=r"weights is ema but ema\.rates is empty"):
        settings(ema={"type": "exponential", "rates": []})
    assert settings(ema={"type": "exponential", "rates": []}, weights="raw").ema.names == []


@pytest.mark.parametrize(("kind", "each"), [("exponential", "rates"), ("power", "widths")])
def test_order_of_averages_is_not_part_of_the_identity(kind: str, each: str) -> None:
    one, other = (settings(ema={"type": kind, each: values}) for values in ([0.1, 0.2], [0.2, 0.1]))
    assert one.identity() == other.identity() and one.average != other.average
    best = [settings(ema={"type": kind, each: values}, weights="best") for values in ([0.1, 0.2], [0.2, 0.1])]
    assert best[0].identity() != best[1].identity()  # best weights are those of the first average


def test_weights_setting_may_name_an_average() -> None:
    rates = {"type": "exponential", "rates": [0.9, 0.99]}
    assert [settings(ema=rates, weights=weights).average for weights in ("ema", 0.99)] == ["ema-0.9", "ema-0.99"]
    with pytest.raises(ValueError, match=r"weights is 0\.5, but the averages are: ema-0\.9, ema-0\.99\. Name"):
        settings(ema=rates, weights=0.5)
    with pytest.raises(ValueError, match=r"\[0\.9, 0\.9\] name an average twice"):
        settings(ema={"type": "exponential", "rates": [0.9, 0.9]})


def test_processes_share_a_batch_evenly_and_the_first_is_the_main_one() -> None:
    worlds = [World(rank, 2, torch.device("cpu")) for rank in range(2)]
    assert all(sorted(shares(7, world)) == [3, 4] for world in worlds)
    assert [world.is_main for world in worlds] == [True, False]


def test_periodic_actions_also_run_at_the_last_step_but_never_at_step_0() -> None:
    assert [step for step in range(8) if _at(step, 3, 7)] == [3, 6, 7]


def parts(**given: Any) -> Any:
    """Return a stand-in with those attributes of a trainer that one of its methods needs."""
    return SimpleNamespace(precision=SimpleNamespace(scaler=torch.amp.GradScaler("cpu", enabled=False)), **given)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_gradient_clipping_matches_pytorch(limit: float) -> None:
    plain, flat = network(), network()
    laid = Flat(flat)
    for each in (plain, flat):
        each(inputs(2)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
    found = Trainer.clip_gradients(parts(_grad_clip=limit, flat=laid, optimizer=SimpleNamespace(torch=None)))
    assert norm > 0.5 and torch.allclose(found, norm)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(laid.named(laid.gradient)[name], parameter.grad)


@pytest.mark.parametrize("compares", [{"best": True}, {"patience": 0.5}])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_validation_loss_is_rejected_where_it_is_compared(compares: dict[str, Any], loss: float) -> None:
    def trainer(best: bool = False, patience: float | None = None) -> Any:
        return parts(best=SimpleNamespace(wanted=best), patience=Patience(2000, patience))

    with pytest.raises(ValueError, match=f"loss is {loss} at step 1,000, but train.weights: best and train.patience"):
        Trainer.validated(trainer(**compares), 1000, loss)
    Trainer.validated(trainer(), 1000, loss)


def test_compiled_network_can_run_eagerly() -> None:
    from torch._dynamo import eval_frame

    for compiled, stance in ((True, "force_eager"), (False, "default")):
        with Trainer.eagerly(parts(_compiles=compiled)):
            assert eval_frame._stance.stance == stance
    assert eval_frame._stance.stance == "default"


def test_only_images_use_channels_last() -> None:
    images, tokens = inputs(2), torch.ones(2, 3, 4)
    for asked, found in ((True, torch.channels_last), (False, torch.contiguous_format)):
        assert Trainer._format(parts(_channels_last=asked), images) is found
        assert Trainer._format(parts(_channels_last=asked), tokens) is torch.contiguous_format


def test_share_of_peak_is_relative_to_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.training.monitor.meter.product_rate", lambda device, dtype: 1e9)
    plain = network()

    def losses(some: Examples, step: int) -> Losses:
        return Losses(plain(some.stored).sum(1), {})

    alone, two = (
        Speed(World(0, size, torch.device("cpu")), torch.float32).values(10.0, examples(2), losses, {"loss"})
        for size in (1, 2)
    )
    assert alone["speed/share_of_peak"] == pytest.approx(1000 * alone["speed/tflops"])
    assert two["speed/share_of_peak"] == pytest.approx(alone["speed/share_of_peak"] / 2)


def test_operations_are_recounted_when_the_parts_of_the_loss_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.training.monitor.meter.product_rate", lambda device, dtype: 1e9)
    plain, speed = network(), Speed(ALONE, torch.float32)

    def rate(passes: int, *parts: str) -> float:
        def losses(some: Examples, step: int) -> Losses:
            return Losses(sum(plain(some.stored).sum(1) for _ in range(passes)), {})  # type: ignore[arg-type]

        return speed.values(10.0, examples(2), losses, {"loss", *parts})["speed/tflops"]

    once = rate(1)
    assert rate(2) == once, "they are counted once"
    assert rate(2, "adversarial") == pytest.approx(2 * once)
    assert rate(1) == once


def test_owner_file_records_the_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job, told in (("71", {"slurm_job": "71"}), (None, {})):
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID")
        State(tmp_path, {}, CheckpointConfig()).claim()
        owner = read_json(tmp_path / "owner.json")
        assert {key: value for key, value in owner.items() if key not in ("token", "host", "pid")} == told


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_gradient_reduction_overlaps_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, sliced: bool, reduce: torch.dtype
) -> None:
    order: list[int | str] = []

    def begin(tensor: Tensor, sent: Tensor | None = None, async_op: bool = True) -> SimpleNamespace:
        sent = tensor if sent is None else sent
        assert sent.dtype == tensor.dtype == reduce
        order.append(sent.numel())
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(flat_vectors, "_PIECE", 1)
    monkeypatch.setattr(distributed.dist, "all_reduce", begin)
    monkeypatch.setattr(distributed.dist, "reduce_scatter_tensor", begin)
    cut, world = network(), World(0, 2, torch.device("cpu"))
    flat = SlicedFlat(cut, world, reduce=reduce) if sliced else Flat(cut, reduce)
    shared = SharedGradient(flat, world, 10, None, lambda loss: loss)
    cut[0].weight.register_post_accumulate_grad_hook(lambda _: order.append("first layer"))
    shared(examples(10), lambda some, _: Losses(cut(some.stored).sum(1), {}))
    assert order[0] == 160 and "first layer" in order, "the last layer's are on their way when the first one's come"
    assert len(order) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_rounded_once_give_autocast_gradients(dtype: torch.dtype) -> None:
    """Bit for bit, in two microbatches; `with_weights` uses the unrounded weights of another vector."""
    gradients = []
    for sliced in (False, True):
        cut = network()
        flat = SlicedFlat(cut, ALONE, computes_in=dtype) if sliced else Flat(cut)

        def losses_of(some: Examples, _: int, cut: nn.Module = cut) -> Losses:
            with torch.autocast("cpu", dtype):
                return Losses(cut(some.stored).square().sum(1).float(), {})

        SharedGradient(flat, ALONE, 10, 6, lambda loss: loss)(examples(10), losses_of)
        gradients.append([slot.within(flat.local) for slot in flat.slots])
        assert {p.dtype for p in cut.parameters()} == ({dtype, torch.float32} if sliced else {torch.float32})
        assert cut[1].weight.dtype == cut[3].bias.dtype == torch.float32, "autocast leaves norms alone"
        with flat.with_weights(2 * flat.values), torch.no_grad():
            assert torch.equal(cut[3].weight, 2 * network()[3].weight)
    for plain, rounded in zip(*gradients, strict=True):
        assert plain.any() and torch.equal(plain, rounded)


def test_strict_mode_rejects_bf16_reduction() -> None:
    with pytest.raises(ValueError, match="reduce: bf16 does not go with deterministic: strict, whose sums are exact"):
        settings(reduce="bf16", deterministic="strict")
    assert settings(reduce="float32").identity() == settings().identity() != settings(reduce="bf16").identity()
    assert "reduce" not in settings().identity(), "checkpoints from before there was a choice go on"
