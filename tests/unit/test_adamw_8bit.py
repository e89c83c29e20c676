"""AdamW with 8-bit moments: same updates as bitsandbytes, and bit-exact resumption."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from crops import crops_of_twelve
from image_diffusion.core.process import command
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.flops import counted
from image_diffusion.training.optim.adam import BLOCK, AdamW8bit, check_library
from image_diffusion.training.parallel.flat_parameters import Flat
from image_diffusion.training.trainer import Task
from tiny_trainings import trained_dit

NETWORK = {"depth": 2, "width": 32, "num_heads": 2, "patch": 4}


def network() -> nn.Module:
    torch.manual_seed(0)
    return DiTConfig.model_validate(NETWORK).build(DataSpec(channels=3, resolution=16, num_classes=3), True)


def gradient(flat: Flat, step: int) -> Tensor:
    return torch.randn(flat.size, generator=torch.Generator().manual_seed(step))


def update(flat: Flat, optimizer: Any, step: int) -> None:
    flat.gradient.copy_(gradient(flat, step))
    optimizer.set_rate(1 / step)
    optimizer.torch.step()


def test_update_equals_bitsandbytes_own_optimizer() -> None:
    """Compare each parameter group of the flat vector, with its own learning rate and weight decay."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    flat, factors = Flat(network()), dict.fromkeys(dict(network().named_parameters()), 1.0)
    factors["blocks.0.attn.qkv.weight"] = 0.5
    config = AdamW8bit(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    optimizer = config.build(flat, factors)
    groups = [
        {"params": [nn.Parameter(part.detach().clone())]} | {key: group[key] for key in ("weight_decay", "factor")}
        for group in optimizer.torch.param_groups
        for part in group["params"]
    ]
    assert len(groups) > 2 and {group["weight_decay"] for group in groups} == {0.1, 0.0}
    assert any(group["params"][0].numel() % BLOCK for group in groups), "a last block that is not full"
    theirs = bitsandbytes.optim.AdamW8bit(groups, lr=0.01, betas=(0.8, 0.95), min_8bit_size=1)
    sizes = [group["params"][0].numel() for group in theirs.param_groups]
    for step in range(1, 6):
        update(flat, optimizer, step)
        for group, part in zip(theirs.param_groups, gradient(flat, step).split(sizes), strict=True):
            group["params"][0].grad, group["lr"] = part.clone(), 0.01 * group["factor"] / step
        theirs.step()
        assert torch.equal(flat.values, torch.cat([group["params"][0].detach() for group in theirs.param_groups]))


def trained(folder: Path, crops: Path, steps: int, **train: Any) -> dict[str, Tensor]:
    optimizer = {"type": "adamw_8bit", "lr": 1e-2, "weight_decay": 0.01}
    settings = {"optimizer": optimizer, "checkpoint": {"every_steps": 3, "keep_last": 9}}
    return trained_dit(folder, crops, NETWORK, steps, **(settings | train))


@pytest.mark.parametrize("changes", [{}, {"precision": "fp16"}, {"deterministic": "strict"}, {"layer_decay": 0.8}])
def test_a_training_that_was_cut_goes_on_to_the_same_bytes(tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    crops = crops_of_twelve(tmp_path)
    whole = trained(tmp_path / "whole", crops, 8, **changes)
    trained(tmp_path / "cut", crops, 5, **changes)
    cut = trained(tmp_path / "cut", crops, 8, **changes)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    exact = trained(tmp_path / "exact", crops, 8, **changes, optimizer={"type": "adamw", "lr": 1e-2})
    assert any(not torch.equal(whole[name], exact[name]) for name in whole)


def test_a_checkpoint_keeps_codes_and_scales(tmp_path: Path) -> None:
    """Moments take a quarter of AdamW's bytes, plus one scale per block."""
    pytest.importorskip("bitsandbytes")
    trained(tmp_path / "short", crops_of_twelve(tmp_path), 3)
    (file,) = (tmp_path / "short/train/state").glob("*/step-0000003/optimizer.safetensors")
    with safe_open(file, framework="pt") as stored:
        kinds = {name: stored.get_tensor(name).dtype for name in stored.keys()}  # noqa: SIM118 - no mapping
    names = [name for name, parameter in network().named_parameters() if parameter.requires_grad]
    moments = {f"{moment}/{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names}
    assert {name for name, kind in kinds.items() if kind == torch.uint8} == moments
    assert kinds.keys() - moments == {"steps", "exp_avg_scale", "exp_avg_sq_scale"}


def test_moments_take_a_quarter_of_the_memory() -> None:
    pytest.importorskip("bitsandbytes")

    def fixed(kind: str) -> tuple[int, int]:
        flat = Flat(network())
        optimizer = TrainConfig.model_validate({"steps": 1, "optimizer": {"type": kind}}).optimizer.build(flat)
        scales = [tensor for name, tensor in optimizer.state_dict().items() if name.endswith("_scale")]
        return sum(vector.nbytes for vector in optimizer.moments.values()), sum(each.nbytes for each in scales)

    assert fixed("adamw")[0] == 4 * fixed("adamw_8bit")[0]
    assert fixed("adamw_8bit")[1] < 0.02 * fixed("adamw_8bit")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gib"), [("adamw", 19.9), ("adamw_8bit", 16.1)])
def test_memory_of_dit_xl2_on_a_card_of_24_gb(kind: str, gib: float) -> None:
    """Figures of docs/gpu.md: two moments of one byte each instead of four."""
    pytest.importorskip("bitsandbytes")
    spec = DataSpec(channels=4, resolution=32, num_classes=1000)
    settings = {"steps": 1, "precision": "bf16", "global_batch": 16, "optimizer": {"type": kind}}

    def task(built: nn.Module) -> Task:
        data: Any = SimpleNamespace(shape=(2, 4, 32, 32), dtype=torch.float16, joined_sets={})
        objective = Denoising(variance="learned_range", loss="hybrid").build(Discrete().build(), spec)
        prepare = lambda stored, label, streams: Batch(stored[:, 0].float(), {"label": label}, streams)  # noqa: E731
        return Task(built, objective, prepare, data)

    network = partial(DiTConfig(size="DiT-XL/2").build, spec, learned_variance=True)
    step = counted(network, task, TrainConfig.model_validate(settings), 1)
    assert step.peak / 2**30 == pytest.approx(gib, rel=0.01)


def test_sharding_that_divides_its_moments_is_rejected() -> None:
    for sharding in ("optimizer", "full", "machine"):
        settings = {"steps": 1, "sharding": sharding, "optimizer": {"type": "adamw_8bit"}}
        with pytest.raises(ValueError, match=f"sharding: {sharding} does not go with optimizer: adamw_8bit, which"):
            TrainConfig.model_validate(settings)


def test_missing_bitsandbytes_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SystemExit):
        command.run(lambda: AdamW8bit().build(Flat(network())))
    told = "error: The package bitsandbytes is needed and not installed. Install it: pip install bitsandbytes\n"
    assert capfd.readouterr().err == told


def test_bitsandbytes_without_gpu_kernels_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def no_kernels(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nlibbitsandbytes_cuda140.so is missing.\nSee the documentation.")

    monkeypatch.setattr(functional, "optimizer_update_8bit_blockwise", no_kernels)
    with pytest.raises(ValueError, match=r"^train\.optimizer is adamw_8bit, but bitsandbytes .*cuda140") as error:
        check_library(torch.device("meta"))
    assert "\n" not in str(error.value) and "or use adamw" in str(error.value)
