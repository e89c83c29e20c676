"""Fine-tuning: frozen parameters, learning rates by depth and by name, and adapters merged into the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crops import crops_of_twelve
from image_diffusion.core.config.base import read_yaml, to_yaml
from image_diffusion.core.files.weights import read_weights, save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.networks.rin import RinConfig
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.nn import transformer
from image_diffusion.stages.train import prepare_training
from image_diffusion.training.checkpoint.averaged_weights import weights_at, weights_in
from image_diffusion.training.config import Lora, TrainConfig
from image_diffusion.training.finetune import add_adapters, check_tuning, merged, tune
from image_diffusion.training.flops import counted
from image_diffusion.training.load_model import load_model
from image_diffusion.training.optim.adam import AdamW
from image_diffusion.training.parallel.flat_parameters import Flat
from tiny_trainings import trained_dit

ROOT = Path(__file__).parents[2]
NETWORK = {"depth": 2, "width": 16, "num_heads": 2, "patch": 4}
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the package peft is not installed")


def network(num_classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return DiTConfig(**NETWORK).build(DataSpec(channels=3, resolution=16, num_classes=num_classes), True)


def factors(built: nn.Module, **settings: Any) -> dict[str, float]:
    return tune(built, TrainConfig.model_validate({"steps": 1} | settings))


def test_rates_fall_towards_the_input() -> None:
    found = factors(network(), layer_decay=0.5)
    assert found["x_embedder.proj.weight"] == found["t_embedder.mlp.0.bias"] == 0.125
    assert {factor for name, factor in found.items() if name.startswith("blocks.0.")} == {0.25}
    assert {factor for name, factor in found.items() if name.startswith("blocks.1.")} == {0.5}
    assert {factor for name, factor in found.items() if name.startswith("final_layer.")} == {1.0}
    assert set(factors(network()).values()) == {1.0}
    with pytest.raises(
        ValueError, match=r"train.layer_decay is 0.5, but the network has no list of blocks. Leave it out"
    ):
        factors(nn.Linear(1, 1), layer_decay=0.5)


def test_gains_of_heads_do_not_decay() -> None:
    """The gains of queries and keys of RIN are [heads, 1, d]."""
    config = RinConfig(width=16, patch=2, depth=2, num_latents=3, num_heads=2, head_width=8, qk_norm=True)
    flat = Flat(config.build(DataSpec(channels=3, resolution=8)))
    vectors = {slot.name for slot in flat.slots if slot.start >= flat.matrices_end}
    gains = {name for name in flat.parameters if name.endswith((".q_norm.gamma", ".k_norm.gamma"))}
    assert len(gains) == 2 * 2 * 5 and gains <= vectors
    assert vectors == gains | {name for name, parameter in flat.parameters.items() if parameter.ndim < 2}


def test_the_output_of_rin_learns_at_the_full_rate() -> None:
    """The output layer is defined before the blocks."""
    config = RinConfig(width=16, patch=2, depth=2, num_latents=3, num_heads=2, head_width=8)
    found = factors(config.build(DataSpec(channels=3, resolution=8)), layer_decay=0.5)
    assert {factor for name, factor in found.items() if name.startswith("to_pixels.")} == {1.0}
    assert {factor for name, factor in found.items() if name.startswith("blocks.1.")} == {0.5}
    assert {factor for name, factor in found.items() if not name.startswith(("to_pixels.", "blocks."))} == {0.125}


@pytest.mark.parametrize("name", ["demo_codec", "dvae_demo"])
def test_rates_by_depth_of_a_codec_are_refused(tmp_path: Path, name: str) -> None:
    raw = read_yaml(ROOT / "config" / "experiments" / f"{name}.yaml")
    (tmp_path / "x.yaml").write_text(to_yaml(raw | {"train": raw["train"] | {"layer_decay": 0.8}}))
    with pytest.raises(ValueError, match=r"x.yaml: train.layer_decay is 0.8, but an encoder and a decoder have no"):
        load_all([tmp_path / "x.yaml"])


def test_middle_block_has_the_rate_of_the_preceding_block() -> None:
    config = UNetConfig(channels=32, multipliers=(1, 2), num_res_blocks=1, attention_resolutions=())
    found = factors(config.build(DataSpec(channels=3, resolution=8), 3), layer_decay=0.9)
    depths = [round(np.log(factor) / np.log(0.9)) for factor in found.values()]
    assert depths == sorted(depths, reverse=True) and depths[0] == depths[-1] + len(set(depths)) - 1
    before = [factor for name, factor in found.items() if name.startswith("input_blocks.")][-1]
    assert {factor for name, factor in found.items() if name.startswith("middle_block.")} == {before}


def test_rates_by_name_are_multiplied() -> None:
    found = factors(network(), layer_decay=0.5, lr_factors={"y_embedder.*": 10, "*.weight": 3})
    assert found["y_embedder.embedding_table.weight"] == 0.125 * 30
    assert found["x_embedder.proj.bias"] == 0.125


def test_learning_rate_factors_match_adamw_parameter_groups() -> None:
    """Bit for bit against PyTorch's AdamW with a group for each parameter; weight decay scales with the rate."""
    ours, theirs = network(), network()
    found = factors(ours, layer_decay=0.7, lr_factors={"*.bias": 2})
    flat = Flat(ours)
    optimizer = AdamW(lr=1e-2, weight_decay=0.1).build(flat, found)
    groups = [
        {"params": [p], "lr": 1e-2 * found[name], "weight_decay": 0.1 if p.ndim > 1 else 0.0}
        for name, p in theirs.named_parameters()
        if p.requires_grad
    ]
    reference = torch.optim.AdamW(groups, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for name in found:
            parameter = theirs.get_parameter(name)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            ours.get_parameter(name).grad.copy_(parameter.grad)  # type: ignore[union-attr]
        reference.step()
        assert optimizer.set_rate(1.0) == 1e-2
        optimizer.torch.step()
    assert all(torch.equal(p, ours.get_parameter(name)) for name, p in theirs.named_parameters())
    assert len(optimizer.torch.param_groups) < len(groups)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"freeze": ("*",)}, r"train.freeze names every parameter, so that nothing is trained"),
        (
            {"freeze": ("blocks.*",), "lr_factors": {"blocks.*": 3}},
            r"train.lr_factors has blocks.\*, which names no trained parameter",
        ),
        ({"freeze": ("block.*",)}, r"train.freeze has block.\*, which names no parameter. They begin with: pos_embed"),
        ({"lr_factors": {"head.*": 2}}, r"train.lr_factors has head.\*, which names no parameter"),
        ({"lora": {"layers": ["y_*"]}}, r"train.lora.layers has y_\*, which names no linear layer"),
        ({"lora": {"whole": ["head"]}}, r"train.lora.whole has head, which names no parameter"),
    ],
)
def test_patterns_that_match_nothing_are_rejected(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_tuning(network(), TrainConfig.model_validate({"steps": 1, "init_from": "x"} | settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora": {}}, r"nothing that adapters could adapt. Set init_from"),
        ({"lora": {}, "init_from": "x", "freeze": ["a"]}, r"with adapters all else is frozen. Leave freeze out"),
    ],
)
def test_settings_without_effect_are_rejected(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainConfig.model_validate({"steps": 1} | settings)


def test_invalid_tuning_is_rejected_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("finetune_base", "finetune_demo"):
        raw = read_yaml(ROOT / "config" / "experiments" / f"{name}.yaml")
        raw["train"] |= {"lr_factors": {"head.*": 2}} if name == "finetune_demo" else {}
        (tmp_path / f"{name}.yaml").write_text(to_yaml(raw))
    with pytest.raises(ValueError, match=r"finetune_demo.yaml: train.lr_factors has head.\*, which names no parameter"):
        load_all([tmp_path / "finetune_demo.yaml"])
    found = importlib.util.find_spec
    absent = ("peft", "bitsandbytes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    for key, value, message in (
        ("lora", {}, "train.lora needs the package peft. Install it: pip install"),
        ("optimizer", {"type": "adamw_8bit"}, "train.optimizer adamw_8bit needs the package bitsandbytes. Install it"),
    ):
        changed = raw | {"train": raw["train"] | {"lr_factors": {}, key: value}}
        (tmp_path / "finetune_demo.yaml").write_text(to_yaml(changed))
        with pytest.raises(ValueError, match=message):
            load_all([tmp_path / "finetune_demo.yaml"])


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": {"type": "muon"}},
        {"freeze": ["*.bias"]},
        {"lr_factors": {"*.bias": 2}},
        {"layer_decay": 0.7},
        {"lora": {}},
    ],
    ids=["muon", "freeze", "lr_factors", "layer_decay", "lora"],
)
@pytest.mark.parametrize("system", ["dit", "iddpm"])
def test_tuning_keys_are_accepted_with_the_default_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, settings: dict[str, Any]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "peft" else found(name))
    data = {"name": "x", "source": {"type": "folder", "path": "x"}, "resolution": 32}
    network = NETWORK if system == "dit" else {"channels": 32}
    base = {"data": data, "system": {"type": system, "network": network}}
    start = {"init_from": {"experiment": "base"}} if "lora" in settings else {}
    (tmp_path / "base.yaml").write_text(to_yaml(base | {"train": {"steps": 1}}))
    (tmp_path / "x.yaml").write_text(to_yaml(base | {"train": {"steps": 1} | start | settings}))
    assert "x" in load_all([tmp_path / "x.yaml", tmp_path / "base.yaml"])


def test_unset_tuning_keys_are_not_part_of_the_identity() -> None:
    keys = {"freeze", "lora", "layer_decay", "lr_factors"}
    assert not keys & TrainConfig(steps=1).identity().keys()
    tuned = TrainConfig.model_validate({"steps": 1, "lora": {}, "init_from": "x", "layer_decay": 0.5})
    assert {"lora", "layer_decay"} <= tuned.identity().keys()


def random_adapters(adapted: nn.Module) -> None:
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)


@needs_peft
def test_merged_weights_match_peft() -> None:
    from peft.tuners.lora import LoraLayer

    plain, adapted = network(), network()
    lora = Lora(rank=2, alpha=6, layers=("blocks.*",), whole=("y_embedder.*",))
    add_adapters(adapted, lora)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name or "y_emb" in name}
    random_adapters(adapted)
    found = merged(adapted.state_dict(), lora)
    assert found.keys() == plain.state_dict().keys()
    plain.load_state_dict(found)
    inputs = torch.randn(2, 3, 16, 16), torch.tensor([3.0, 700.0]), torch.tensor([0, 2])
    nn.init.normal_(plain.final_layer.linear.weight)  # type: ignore[union-attr, arg-type]
    adapted.load_state_dict(
        {"final_layer.linear.weight": plain.state_dict()["final_layer.linear.weight"]}, strict=False
    )
    torch.testing.assert_close(plain(*inputs), adapted(*inputs), rtol=0, atol=1e-5)
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            module.merge()
            theirs = module.get_base_layer().weight
            torch.testing.assert_close(found[f"{name}.weight"], theirs, rtol=0, atol=1e-6)


@needs_peft
def test_adapters_apply_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "writes_gelu", lambda x: not torch.is_grad_enabled())  # as on a GPU
    adapted = network()
    add_adapters(adapted, Lora(rank=2, alpha=6, layers=("blocks.*.mlp.fc1",)))
    random_adapters(adapted)
    mlp, x = adapted.blocks[0].mlp, torch.randn(2, 5, 16)  # type: ignore[index, union-attr]
    with torch.no_grad():
        found = mlp(x)
    torch.testing.assert_close(found, mlp(x), rtol=0, atol=1e-5)


@pytest.fixture
def crops(tmp_path: Path) -> Path:
    return crops_of_twelve(tmp_path)


def trained(folder: Path, crops: Path, steps: int = 6, **train: Any) -> dict[str, Tensor]:
    settings = {"optimizer": {"type": "adam", "lr": 1e-2}, "checkpoint": {"every_steps": 2, "keep_last": 9}}
    return trained_dit(folder, crops, NETWORK, steps, **(settings | train))


TUNED: dict[str, Any] = {"layer_decay": 0.8, "lr_factors": {"final_layer.*": 2}}
ADAPTED: dict[str, Any] = {"lora": {"rank": 2, "layers": ["blocks.*"], "whole": ["y_embedder.*"]}, "layer_decay": 0.8}


@pytest.mark.parametrize("settings", [TUNED, pytest.param(ADAPTED, marks=needs_peft)], ids=["rates", "adapters"])
def test_a_training_that_was_cut_goes_on_to_the_same_bytes(
    tmp_path: Path, crops: Path, settings: dict[str, Any]
) -> None:
    first = trained(tmp_path / "base", crops)
    settings = {**settings, "init_from": str(tmp_path / "base/train"), "seed": 1}
    whole = trained(tmp_path / "whole", crops, **settings)
    trained(tmp_path / "cut", crops, steps=4, **settings)
    cut = trained(tmp_path / "cut", crops, **settings)
    assert whole.keys() == cut.keys() == first.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert not torch.equal(whole["blocks.0.attn.qkv.weight"], first["blocks.0.attn.qkv.weight"])


@needs_peft
def test_training_with_adapters_writes_a_plain_network(tmp_path: Path, crops: Path) -> None:
    first = trained(tmp_path / "base", crops)
    found = trained(tmp_path / "lora", crops, **ADAPTED, init_from=str(tmp_path / "base/train"), keep_raw=True)
    changed = {name for name in first if not torch.equal(first[name], found[name])}
    linear = {name for name in first if name.startswith("blocks.") and name.endswith("weight")}
    assert changed == linear | {"y_embedder.embedding_table.weight"}
    difference = found["blocks.0.attn.qkv.weight"] - first["blocks.0.attn.qkv.weight"]
    assert torch.linalg.svdvals(difference)[2] < 1e-5 < torch.linalg.svdvals(difference)[1]  # rank 2
    model = load_model(tmp_path / "lora/train")
    assert model.num_steps == 6 and "base_layer" not in str(model.network)
    written, _ = weights_in(tmp_path / "lora/train/state", step=6, average="0.5")
    assert all(torch.equal(written[name], found[name]) for name in found)
    raw, _ = weights_at(tmp_path / "lora/train/state", tmp_path / "lora/train", average="raw")
    kept = read_weights(tmp_path / "lora/train/raw")[0]
    assert all(torch.equal(raw[name], kept[name]) for name in kept)
    again = trained(tmp_path / "again", crops, init_from=str(tmp_path / "lora/train"))  # usable as initial weights
    assert again.keys() == first.keys()


@needs_peft
def test_doctor_counts_only_trained_parameters_with_adapters(tmp_path: Path, crops: Path) -> None:
    trained(tmp_path / "base", crops)
    trained(tmp_path / "lora", crops, **ADAPTED, init_from=str(tmp_path / "base/train"))
    found = {}
    for name in ("base", "lora"):
        training = prepare_training(tmp_path / name / "train.yaml", crops / "manifest.json", None)
        found[name] = counted(training.network, training.task, training.stage.train, 1)
    adapted = 2 * 2 * sum(a + b for a, b in ((16, 48), (16, 16), (16, 64), (64, 16), (16, 96)))
    assert found["lora"].parameters == adapted + 4 * 16 < found["base"].parameters
    assert found["lora"].fixed < found["base"].fixed


@needs_peft
def test_new_but_frozen_classes_cause_a_warning(
    tmp_path: Path, crops: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "base", crops)
    tensors, model = read_weights(tmp_path / "base/train")
    described = {key: value for key, value in model.items() if key not in ("format", "sha256")}
    save_weights(tmp_path / "other", tensors, described | {"classes": ["d", "b", "c"]})
    trained(tmp_path / "lora", crops, lora={}, init_from=str(tmp_path / "other"))
    assert "y_embedder.embedding_table.weight is new for other classes, but frozen" in capsys.readouterr().err
