"""Operators that a training needs on Apple's GPUs (MPS), checked against PyTorch's table of kernels without a GPU."""

from __future__ import annotations

import traceback
from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from tiny_runs import SYSTEMS, TINY, config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Trainer

pytestmark = pytest.mark.slow

SHAPES = World(0, 1, torch.device("meta"))
TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
PACKAGE = "/image_diffusion/"


@cache
def operators() -> dict[str, dict[str, Any]]:
    """Return the entries of PyTorch's table of operators by name and overload."""
    entries = yaml.load(TABLE.read_text(), yaml.CSafeLoader)
    return {entry["func"].partition("(")[0]: entry for entry in entries}


def has_kernel(operator: Any) -> bool:
    """Return True if the operator has a kernel for MPS, or is composed of other operators."""
    name, overload = operator._schema.name.removeprefix("aten::"), operator._schema.overload_name
    entry = operators()[f"{name}.{overload}" if overload else name]
    entry = operators()[entry["structured_delegate"]] if "structured_delegate" in entry else entry
    keys = {key.strip() for listed in entry.get("dispatch", {}) for key in listed.split(",")}
    return not keys or any(key == "MPS" or key.startswith("Composite") for key in keys)


class Watch(TorchDispatchMode):
    """Records the operators on the device, and the files of the package that compute in float64 there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[Any] = set()
        self.float64: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.device.type == "meta"]
        if there:
            self.operators.add(func)
        if any(tensor.dtype == torch.float64 for tensor in there):
            frames = [frame.filename for frame in traceback.extract_stack() if PACKAGE in frame.filename]
            self.float64[frames[-1].rpartition(PACKAGE)[2]].add(str(func))
        return result


@pytest.mark.parametrize("system", TINY)
def test_training_step_uses_operators_with_mps_kernels(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # autocast does not support the meta device
    with Watch() as watch:
        trainer = Trainer(SYSTEMS[system](SHAPES), config(), SHAPES)
        examples = next(trainer.batches(0))
        losses = trainer.backward(examples, 1)
        norm = trainer.clip_gradients()
        trainer.update(1)
        trainer.observe(1, losses, norm)
    assert len(watch.operators) > 40
    assert [operator for operator in watch.operators if not has_kernel(operator)] == []
    assert "training/monitor/meter.py" in watch.float64
    assert any(file.startswith(("core/random/", "process/", "objectives/")) for file in watch.float64) or (
        system in ("tokens", "adversarial", "vector_dvae", "autoencoder")
    )


def test_operator_without_mps_kernel_is_detected() -> None:
    assert not has_kernel(torch.ops.aten.linalg_eig.default)
    assert has_kernel(torch.ops.aten.addmm.default)
