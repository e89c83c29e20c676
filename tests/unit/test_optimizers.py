"""Muon and Lion on flat parameters: the choice of parameters, and the updates of their papers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.nn.blocks import inner_matrices, set_num_maps
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import tune
from image_diffusion.training.optim import muon
from image_diffusion.training.optim.lion import Lion
from image_diffusion.training.optim.muon import Muon
from image_diffusion.training.parallel.flat_parameters import Flat

SPEC = DataSpec(channels=3, resolution=16, num_classes=3)
INNER = {"blocks.0.0.weight": 3, "blocks.0.1.weight": 1, "blocks.1.weight": 1}
RATE, STEPS = 0.02, 4
SCALES = ["match_rms_adamw", "original", "spectral_unclamped"]


def scales() -> list[str]:
    """Return the scales of Muon that the installed PyTorch supports: 2.15 has all."""
    found = []
    for scale in SCALES:
        with suppress(ValueError):
            torch.optim.Muon([torch.zeros(1, 1)], adjust_lr_fn=scale)
            found.append(scale)
    return found


class Blocks(nn.Module):
    """A first layer, a block whose layer holds three matrices, a convolution as a block, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        shared = set_num_maps(nn.Linear(8, 24), 3)
        self.blocks = nn.ModuleList([nn.Sequential(shared, nn.Linear(24, 8, bias=False)), nn.Conv2d(8, 6, 3)])


def network() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def gradients(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=drawn) for name, p in network().named_parameters()}


def trained(config: Muon | Lion, factors: dict[str, float] | None = None) -> dict[str, Tensor]:
    """Return the parameters after some steps, at 1, 1/2, 1/3, … of the learning rate."""
    flat = Flat(network())
    optimizer = config.build(flat, factors)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            flat.named(flat.gradient)[name].copy_(gradient)
        assert optimizer.set_rate(1 / (step + 1)) == pytest.approx(config.lr / (step + 1))
        optimizer.torch.step()
    return flat.named(flat.values)


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("in_bf16", [True, False])
def test_muon_matches_pytorch_on_each_matrix_and_adamw_on_the_rest(
    scale: str, nesterov: bool, in_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch orthogonalises in bfloat16. Updates in float32 differ from it by at most 3 %: its rounding."""
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: in_bf16)
    plain = dict(network().named_parameters())
    settings: Any = {"lr": RATE, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    config = Muon.model_validate(settings | {"scale": scale, "adamw": {"lr": 0.01, "weight_decay": 0.2}})
    factors = dict.fromkeys(plain, 1.0) | {"first.weight": 0.5, "blocks.0.1.weight": 3.0}
    assert inner_matrices(network()) == INNER
    maps = {name: [nn.Parameter(p) for p in plain[name].detach().flatten(1).chunk(n)] for name, n in INNER.items()}
    groups = [{"params": each, "factor": RATE * factors[name]} for name, each in maps.items()]
    rest = [
        {"params": [p], "factor": 0.01 * factors[name], "weight_decay": 0.2 if p.ndim > 1 else 0.0}
        for name, p in plain.items()
        if name not in INNER
    ]
    theirs = torch.optim.Muon(groups, **settings, adjust_lr_fn=scale), torch.optim.AdamW(rest, fused=True)
    for step in range(STEPS):
        given = gradients(step)
        for name, gradient in given.items():
            plain[name].grad = gradient
        for name, parts in maps.items():
            for part, own in zip(parts, given[name].flatten(1).chunk(len(parts)), strict=True):
                part.grad = own
        for optimizer in theirs:
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] / (step + 1)
            optimizer.step()
    for name, value in trained(config, factors).items():
        expected = (torch.cat(list(maps[name])).view_as(value) if name in maps else plain[name]).detach()
        if name in maps and not in_bf16:
            moved = expected - network().get_parameter(name).detach()
            assert 0 < (value - expected).norm() < 0.03 * moved.norm()
        else:
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("in_bf16", [True, False])
def test_muon_update_has_singular_values_near_one(in_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published band is 0.5 to 1.5 (PyTorch's documentation of Newton and Schulz's five steps)."""
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: in_bf16)
    torch.manual_seed(0)
    dit = DiTConfig(depth=1, width=32, num_heads=2, patch=4).build(SPEC)
    flat = Flat(dit.to(memory_format=torch.channels_last))
    before = {name: value.clone() for name, value in flat.named(flat.values).items()}
    flat.gradient.normal_()
    optimizer = Muon(lr=1.0, scale="original").build(flat)
    optimizer.set_rate(1.0)
    optimizer.torch.step()
    seen = 0
    for name, count in flat.inner.items():
        for update in (before[name] - flat.named(flat.values)[name]).chunk(count):
            m, n = update.shape
            values = torch.linalg.svdvals(update) / math.sqrt(max(1, m / n))
            # The smallest of a square random matrix are near zero: too small for five steps to reach the band.
            assert values.median() > 0.5 and values.max() < 1.5
            assert m == n or values.min() > 0.5
            seen += 1
    assert seen == 3 + 1 + 1 + 1 + 6


def test_muon_updates_the_matrices_in_the_blocks() -> None:
    unet = UNetConfig(channels=32, multipliers=(1, 2), num_res_blocks=1, attention_resolutions=(8,)).build(SPEC, 3)
    found = inner_matrices(unet)
    weights = {name for name, p in unet.named_parameters() if p.ndim > 1}
    assert weights - found.keys() == {
        "time_embed.0.weight", "time_embed.2.weight", "label_emb.weight", "input_blocks.0.0.weight", "out.2.weight",
    }  # fmt: skip
    assert found["middle_block.1.qkv.weight"] == 3 * unet.middle_block[1].num_heads, "of each head, in this order"
    assert found["middle_block.0.emb_layers.1.weight"] == 2, "scale and shift"


def test_muon_keeps_one_moment_per_matrix_and_works_without_adamw_parameters() -> None:
    adapters = network()
    for name, parameter in adapters.named_parameters():
        parameter.requires_grad_(name in INNER)
    optimizer = Muon().build(Flat(adapters))
    assert {name: vector.numel() for name, vector in optimizer.moments.items()} == {
        "exp_avg": sum(adapters.get_parameter(name).numel() for name in INNER),
        "exp_avg_sq": 0,
    }
    assert optimizer.set_rate(0.5) == 0.5e-4
    optimizer.torch.step()


@pytest.mark.parametrize("freeze", [(), ("blocks.*",)])
def test_muon_without_a_matrix_is_rejected(freeze: tuple[str, ...]) -> None:
    config = TrainConfig.model_validate({"steps": 1, "freeze": freeze, "optimizer": {"type": "muon"}})
    assert config.checks_network
    with pytest.raises(ValueError, match=r"train\.optimizer is muon, but no linear or convolutional layer in the"):
        tune(network() if freeze else nn.Sequential(nn.Linear(2, 2)), config)


def test_muon_scale_unknown_to_pytorch_is_reported_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(parameters: Any, adjust_lr_fn: str) -> None:
        if adjust_lr_fn == "spectral_unclamped":
            raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported")

    assert {"match_rms_adamw", "original"} <= set(scales()) and (len(scales()) == 3 or torch.__version__ < "2.15")
    monkeypatch.setattr(torch.optim, "Muon", older)
    with pytest.raises(ValueError, match=r"^train\.optimizer\.scale is spectral_unclamped, which PyTorch .* does not"):
        tune(network(), TrainConfig.model_validate({"steps": 1, "optimizer": {"type": "muon", "scale": SCALES[2]}}))
    tune(network(), TrainConfig.model_validate({"steps": 1, "optimizer": {"type": "muon", "scale": SCALES[1]}}))


def test_muon_cannot_be_sharded() -> None:
    with pytest.raises(ValueError, match="optimizer does not go with optimizer: muon, which needs"):
        TrainConfig.model_validate({"steps": 1, "sharding": "optimizer", "optimizer": {"type": "muon"}})


def test_lion_matches_its_paper() -> None:
    found = trained(Lion(lr=RATE, betas=(0.8, 0.7), weight_decay=0.3))
    for name, p in network().named_parameters():
        x, m = p.detach().double(), torch.zeros_like(p, dtype=torch.float64)
        for step in range(STEPS):
            g, eta = gradients(step)[name].double(), RATE / (step + 1)
            x = x - eta * (torch.sign(0.8 * m + 0.2 * g) + (0.3 * x if x.ndim > 1 else 0.0))
            m = 0.7 * m + 0.3 * g
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-6)
