"""Modes of `train.deterministic`: the switches that each sets in PyTorch, and their restoration after training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from image_diffusion.training.config import TrainConfig
from image_diffusion.training.optim.numerics import Mode, switches

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"

FIXES_COMPILED = hasattr(inductor, "deterministic")
"""True if this PyTorch can fix the choice of compiled kernels: from 2.10 on."""

FIXED = {"deterministic": True, "benchmark": False, "compiled": FIXES_COMPILED, WORKSPACES: ":4096:8"}
ASKED: dict[str, dict[str, Any]] = {
    "off": {"deterministic": False, "benchmark": True, "compiled": False, WORKSPACES: None, "threads": 2},
    "run": {"deterministic": True, "benchmark": False, "compiled": FIXES_COMPILED, WORKSPACES: ":4096:8", "threads": 2},
    "strict": {
        "deterministic": True,
        "benchmark": False,
        "compiled": FIXES_COMPILED,
        WORKSPACES: ":4096:8",
        "threads": 1,
    },
}


def settings(mode: str, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 10, "deterministic": mode, "compile": True, **changes})


def asked() -> dict[str, Any]:
    """Return PyTorch's current switches."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "compiled": FIXES_COMPILED and inductor.deterministic,
        WORKSPACES: os.environ.get(WORKSPACES),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACES, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("ends", ["well", "ill"])
def test_each_mode_sets_its_switches_and_restores_them(mode: Mode, ends: str) -> None:
    before, tf32 = asked(), torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(KeyError) if ends == "ill" else nullcontext(), switches(mode, not tf32, compiled=FIXES_COMPILED):
        assert asked() == ASKED[mode]
        assert torch.backends.cuda.matmul.allow_tf32 is not tf32
        # The backward pass of flash attention uses its deterministic kernel only without warn_only.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        if ends == "ill":
            raise KeyError
    assert asked() == before and torch.backends.cuda.matmul.allow_tf32 is tf32


def test_cublas_workspaces_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACES, ":16:8")
    with switches("run", allow_tf32=False, compiled=FIXES_COMPILED):
        assert os.environ[WORKSPACES] == ":16:8"
    assert os.environ[WORKSPACES] == ":16:8"


def test_default_mode_is_run_and_older_checkpoints_remain_valid() -> None:
    usual = TrainConfig(steps=10)
    assert usual.deterministic == "run"
    assert settings("off").identity() == usual.identity() != settings("strict").identity()
    assert usual.identity()["deterministic"] == "off", "checkpoints of the default before go on"
    assert "strict_chunk" not in usual.identity()


@pytest.mark.parametrize("mode", ["run", "strict"])
def test_nondeterministic_operation_is_reported_in_one_line(mode: Mode) -> None:
    told = (
        rf"train\.deterministic is {mode}, but put_ has no kernel with a fixed order of sums on this device\. Set train"
    )
    with pytest.raises(ValueError, match=told), switches(mode, allow_tf32=False, compiled=FIXES_COMPILED):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    with switches("off", allow_tf32=False, compiled=True):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="something else"), switches(mode, allow_tf32=False, compiled=FIXES_COMPILED):
        raise RuntimeError("something else")


class Older:
    """PyTorch's settings of compiled kernels before 2.10."""

    def __getattr__(self, name: str) -> Any:
        if name == "deterministic":
            raise AttributeError(name)
        return getattr(inductor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignore what `torch.use_deterministic_algorithms` sets from 2.10 on."""


@pytest.mark.parametrize("mode", ["run", "strict"])
def test_pytorch_without_deterministic_compilation_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    before = asked()
    monkeypatch.setattr("torch._inductor.config", Older())
    told = (
        rf"^train\.deterministic is {mode} and the training is compiled, but PyTorch [^\n]*2\.10 or newer[^\n]*off\.$"
    )
    with pytest.raises(ValueError, match=told), switches(mode, allow_tf32=False, compiled=True):
        pass
    with switches(mode, allow_tf32=False, compiled=False), switches("off", allow_tf32=False, compiled=True):
        pass
    assert asked() == before


PROGRAM = """
import os
import sys
from pathlib import Path
import torch
from image_diffusion.training.trainer import Trainer
sys.path.insert(0, {tests!r})
from test_session import start

def told(self, step):
    print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads(),
          os.environ.get("CUBLAS_WORKSPACE_CONFIG"), flush=True)
    updated(self, step)

updated, Trainer.update = Trainer.update, told
start(Path("run"), steps=1, deterministic=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "strict" else pytest.mark.long) for mode in ASKED]
)
def test_launched_processes_train_in_the_configured_mode(mode: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    launcher = [
        sys.executable,
        "-m",
        "image_diffusion.training.parallel.launch",
        "--logs",
        "logs",
        "--threads-per-process",
        "2",
    ]
    environment = {name: value for name, value in os.environ.items() if name != WORKSPACES}
    done = subprocess.run(
        [*launcher, "--", "program", mode], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [ASKED[mode][name] for name in ("deterministic", "benchmark", "threads", WORKSPACES)]
    assert " ".join(map(str, expected)) in done.stdout.splitlines()
