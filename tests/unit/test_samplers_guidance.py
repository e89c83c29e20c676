"""Guided networks: calls of the wrapped networks, mixed channels, and unguided times."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest
from image_diffusion.process.base import Grid
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.guidance import Guidance, guided, times_between
from image_diffusion.samplers.ode import Heun
from image_diffusion.systems.diffusion.generator import Reading, SampleConfig, check_guidance

NULL = {"label": torch.tensor(10)}


class Recorder:
    """A network with 2 C output channels whose output depends on every input; records every call."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset
        self.calls: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def __call__(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        self.calls.append((x, t, cond))
        label = cond["label"].to(x).view(-1, 1, 1, 1) + self.offset
        return torch.cat([x * label, x + label], dim=1)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 2, generator=generator)
    low_res = torch.randn(3, 3, 1, 1, generator=generator)
    return x, torch.full((3,), 0.5), {"label": torch.tensor([1, 2, 3]), "low_res": low_res}


def told(x: Tensor, t: Tensor, /, text: Tensor, image: Tensor, label: Tensor) -> Tensor:
    """A network whose conditions interact; its last channels depend on the text alone."""
    mean = t.view(-1, 1, 1, 1) * x + (text + 2 * image + 4 * text * image + 8 * label).view(-1, 1, 1, 1)
    return torch.cat([mean, text.view(-1, 1, 1, 1).expand_as(x)], dim=1)


@pytest.mark.parametrize("names", [("image", "text"), ("text", "image"), ("text",)])
def test_each_condition_is_scaled_relative_to_those_before_it(names: tuple[str, ...]) -> None:
    """Compare with equation 3 of Brooks et al. 2023, evaluated call by call."""
    generator = torch.Generator().manual_seed(0)
    x, t, label = torch.randn(3, 3, 2, 2, generator=generator), torch.tensor([0.2, 0.5, 0.9]), torch.ones(3)
    cond = {"text": torch.tensor([1.0, 2.0, 3.0]), "image": torch.tensor([0.5, -1.0, 2.0])}
    null, scales = {name: torch.tensor(0.25) for name in cond}, dict(zip(names, (1.5, 7.5), strict=False))
    calls = []

    def network(x: Tensor, t: Tensor, /, **given: Tensor) -> Tensor:
        calls.append(len(x))
        return told(x, t, **given)

    out = guided(network, scales, null)(x, t, **cond, label=label)
    assert calls == [3 * (1 + len(names))]
    kept = {name: value for name, value in cond.items() if name not in names} | {"label": label}
    empty = {name: torch.full((3,), 0.25) for name in cond}
    levels = [
        told(x, t, **{name: (cond if name in names[:k] else empty)[name] for name in names}, **kept)[:, :3]
        for k in range(len(names) + 1)
    ]
    expected = levels[0]
    for scale, low, high in zip(scales.values(), levels[:-1], levels[1:], strict=True):
        expected = expected + scale * (high - low)
    torch.testing.assert_close(out[:, :3], expected)
    assert torch.equal(out[:, 3:], told(x, t, **cond, label=label)[:, 3:])
    ones = guided(told, dict.fromkeys(names, 1.0), null)(x, t, **cond, label=label)
    torch.testing.assert_close(ones, told(x, t, **cond, label=label))


def test_scales_follow_power_and_interval_and_each_costs_a_prediction() -> None:
    grid = Flow().build().grid(8)
    cond = {"text": torch.tensor([1.0]), "image": torch.tensor([0.5]), "label": torch.ones(1)}
    null, x = {"image": torch.tensor(0.0)}, torch.linspace(-1, 1, 12).view(1, 3, 2, 2)
    for more in ({"power": 2.0}, {"interval": (0.1, 1.0)}, {"channels": "first_three"}):
        one = Guidance(guidance_scale=3, **more).build(told, null, grid)
        of_part = Guidance(scales={"image": 3}, **more).build(told, null, grid)
        for time in grid.time[:-1]:
            t = time.view(1).float()
            torch.testing.assert_close(of_part(x, t, **cond), one(x, t, **cond))
        share = Guidance(guidance_scale=3, **more).share(grid)
        assert Guidance(scales={"image": 3, "text": 1}, **more).share(grid) == 2 * share


def test_invalid_scales_are_rejected_and_unset_ones_are_not_written() -> None:
    with pytest.raises(ValueError, match="guidance_scale is 2 and scales is set, each in place of the other"):
        Guidance(guidance_scale=2, scales={"text": 2})
    with pytest.raises(ValueError, match="a scale for 'text', which is no condition of the network. Known: label"):
        guided(Recorder(), {"text": 2.0}, NULL)
    assert "scales" not in Guidance().model_dump() and Guidance(scales={"a": 2}).model_dump()["scales"] == [["a", 2.0]]


def test_order_of_scales_is_part_of_the_configuration() -> None:
    one, other = ({"scales": dict(pairs)} for pairs in ((("a", 2.0), ("b", 3.0)), (("b", 3.0), ("a", 2.0))))
    written = [dump(Guidance.model_validate(scales)) for scales in (one, other)]
    assert digest(written[0]) != digest(written[1])
    again = [Guidance.model_validate(plain).scales for plain in written]
    assert [list((scales or {}).items()) for scales in again] == [[("a", 2.0), ("b", 3.0)], [("b", 3.0), ("a", 2.0)]]


def test_scale_one_returns_the_network() -> None:
    network = Recorder()
    assert guided(network, 1.0, NULL) is network
    assert guided(network, 1.0, {}) is network


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(0, 20).filter(lambda value: value != 1),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    first_three=st.booleans(),
)
def test_one_batched_call_guides_only_the_selected_channels(scale: float, labels: list[int], first_three: bool) -> None:
    network = Recorder()
    label = torch.tensor(labels)
    x = torch.linspace(-1, 1, 16 * len(labels)).view(-1, 4, 2, 2)
    t = torch.linspace(0.1, 0.9, len(labels))
    out = guided(network, scale, NULL, "first_three" if first_three else "all")(x, t, label=label)

    ((both_x, both_t, both_cond),) = network.calls
    assert torch.equal(both_x, torch.cat([x, x]))
    assert torch.equal(both_t, torch.cat([t, t]))
    assert both_cond["label"].tolist() == [*labels, *[10] * len(labels)]

    positive, negative = network(x, t, label=label), network(x, t, label=torch.full_like(label, 10))
    count = 3 if first_three else 4
    expected = negative + scale * (positive - negative)
    torch.testing.assert_close(out[:, :count], expected[:, :count])
    assert torch.equal(out[:, count:], positive[:, count:])


def test_a_condition_without_null_is_shared(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    x, t, cond = inputs
    network = Recorder()
    guided(network, 3.0, NULL)(x, t, **cond)
    low_res = network.calls[0][2]["low_res"]
    assert torch.equal(low_res, torch.cat([cond["low_res"], cond["low_res"]]))


def test_autoguidance_moves_away_from_the_weaker_network(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    """Both are called once with the same condition."""
    x, t, cond = inputs
    strong, weak = Recorder(), Recorder(offset=0.5)
    out = guided(strong, 2.0, {}, negative=weak)(x, t, **cond)
    assert len(strong.calls) == len(weak.calls) == 1
    assert torch.equal(weak.calls[0][2]["label"], cond["label"])
    good, bad = strong(x, t, **cond), weak(x, t, **cond)
    torch.testing.assert_close(out[:, :4], 2 * good[:, :4] - bad[:, :4])
    assert torch.equal(out[:, 4:], good[:, 4:])


def test_a_weaker_network_can_be_unconditional_too(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    x, t, cond = inputs
    weak = Recorder(offset=0.5)
    guided(Recorder(), 2.0, NULL, negative=weak)(x, t, **cond)
    assert weak.calls[0][2]["label"].tolist() == [10, 10, 10]


def test_outside_the_interval_there_is_one_plain_call(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    x, _, cond = inputs
    network = Recorder()
    guided_network = guided(network, 3.0, NULL, times=(0.2, 0.6))
    out = guided_network(x, torch.full((3,), 0.7), **cond)
    assert [len(call[0]) for call in network.calls] == [3]
    assert torch.equal(out, network(x, torch.full((3,), 0.7), **cond))
    mixed = guided_network(x, torch.tensor([0.6, 0.7, 0.1]), **cond)
    everywhere = guided(network, 3.0, NULL)(x, torch.tensor([0.6, 0.7, 0.1]), **cond)
    assert torch.equal(mixed[0], everywhere[0])
    assert torch.equal(mixed[1:], out[1:])


def test_an_interval_of_noise_levels_follows_the_grid(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    """On the straight path sigma / alpha = t / (1 - t): 0.3 to 1.6 are t = 0.3, …, 0.6 of ten steps."""
    x, _, cond = inputs
    grid = Flow(time_scale=1000).build().grid(10)
    assert times_between(grid, 0.3, 1.6) == pytest.approx((300.0, 600.0))
    network = Recorder()
    guided_network = Guidance(guidance_scale=2, interval=(0.3, 1.6)).build(network, NULL, grid)
    for time in grid.time.tolist():
        guided_network(x, torch.full((3,), time), **cond)
    assert [len(call[0]) for call in network.calls] == [3, 3, 3, 3, 6, 6, 6, 6, 3, 3]


def test_power_raises_the_scale_from_one(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    """1 at the first time, guidance_scale at the end; in between the formula of MDTv2's code in t / T."""
    x, _, cond = inputs
    network = Recorder()
    risen = Guidance(guidance_scale=3.0, power=4.0).build(network, NULL, Flow(time_scale=1000).build().grid(10))
    t = torch.tensor([1000.0, 250.0, 0.0])
    scale = 1 + 2 * (1 - math.cos(math.pi * 0.75**4)) / 2
    expected = [guided(network, each, NULL)(x, t, **cond)[i] for i, each in enumerate((1 + 1e-12, scale, 3.0))]
    torch.testing.assert_close(risen(x, t, **cond), torch.stack(expected))


def test_power_requires_a_time_from_one_to_zero() -> None:
    reading = Reading(process=Edm(), prediction="x0", variance="fixed_small", drops_labels=True)
    chosen = SampleConfig(sampler=Heun(num_steps=4), guidance=Guidance(guidance_scale=2, power=2.0))
    with pytest.raises(ValueError, match=r"^sample.guidance.power is set, but time of the process edm is a logarithm"):
        check_guidance("sample", chosen, reading)
    check_guidance("sample", chosen, reading.model_copy(update={"process": Flow()}))


def test_share_counts_the_guided_points() -> None:
    grid = Flow(time_scale=1000).build().grid(10)
    assert Guidance(guidance_scale=1, interval=(0.3, 1.6)).share(grid) == 0
    assert Guidance(guidance_scale=2).share(grid) == 1
    assert Guidance(guidance_scale=2, interval=(0.3, 1.6)).share(grid) == pytest.approx(0.4)
    assert Guidance(guidance_scale=2, interval=(3 / 7, 3 / 7 + 1e-9)).share(grid) == pytest.approx(0.1)


def test_interval_between_grid_points_guides_no_step() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    grid = Grid(ones[:1], ones, torch.tensor([1.0, 0.0], dtype=torch.float64))
    low, high = times_between(grid, 0.1, 0.2)
    assert low > high


def test_mistakes_are_told_in_one_line(inputs: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
    x, t, cond = inputs
    with pytest.raises(ValueError, match=r"guidance_scale is 2\.0, but the network has no condition to leave out"):
        guided(Recorder(), 2.0, {})
    with pytest.raises(ValueError, match=r"leaves out 'text', which is not a condition.*Known: label, low_res\."):
        guided(Recorder(), 2.0, {"text": torch.zeros(())})(x, t, **cond)
    with pytest.raises(ValueError, match=r"first_three guides three channels, but x has 2"):
        guided(Recorder(), 2.0, NULL, "first_three")(x[:, :2], t, **cond)
    with pytest.raises(ValueError, match=r"guidance interval is \(2\.0, 1\.0\); expected 0 <= low < high"):
        Guidance(interval=(2.0, 1.0))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Guidance(guidance_scale=-1)
