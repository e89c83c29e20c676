"""A stage that asks for GPUs does not compute on the CPU without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from image_diffusion.core import devices
from image_diffusion.training.parallel.world import join

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_without_a_request_the_cpu_is_taken(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.delenv(devices.REQUESTED, raising=False)
    assert devices.best_device() == torch.device("cpu")


def test_a_driver_that_is_too_old_ends_the_stage(no_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update.")

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")
    no_gpu.setattr(devices, "_DRIVER", tmp_path / "version")
    no_gpu.setattr(torch.cuda, "init", too_old)
    no_gpu.setattr(torch.version, "cuda", "13.2")
    no_gpu.setenv(devices.REQUESTED, "4")
    for use in (devices.best_device, lambda: join().__enter__()):
        with pytest.raises(ValueError, match="4 GPUs requested") as error:
            use()
        for part in ("for CUDA 13.2", "found version 12020", "535.183.01", "--torch-backend=auto", "gpus_per_node=0"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def test_a_build_without_cuda_is_named(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.setattr(torch.version, "cuda", None)
    no_gpu.setenv(devices.REQUESTED, "1")
    with pytest.raises(ValueError, match=r"1 GPU requested .* is built without CUDA"):
        devices.best_device()


def test_rules_hand_the_request_to_the_stage(tmp_path: Path) -> None:
    line = [ROOT / "workflow/scripts/logged", "--gpus", "3", "logs/stage.log", sys.executable, "-c"]
    code = "import os; print(os.environ['IMAGE_DIFFUSION_GPUS'])"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([*line, code], cwd=tmp_path, capture_output=True, text=True, env={"PATH": path}, check=True)
    assert done.stdout.strip() == "3"
