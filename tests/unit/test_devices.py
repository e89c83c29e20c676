"""A stage that requests GPUs does not silently compute on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from image_diffusion.core import devices
from image_diffusion.nn.blocks import check_compiler, compile_by_block
from image_diffusion.nn.precision import computes_in
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.parallel.world import World, join

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
OF_CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_cpu_is_used_without_a_gpu_request(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.delenv(devices.REQUESTED, raising=False)
    assert devices.best_device() == torch.device("cpu")


def test_outdated_driver_ends_the_stage(no_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update.")

    (tmp_path / "version").write_text("535.183.01\n")
    no_gpu.setattr(devices, "_DRIVER", tmp_path / "version")
    no_gpu.setattr(torch.cuda, "init", too_old)
    no_gpu.setattr(torch.version, "cuda", "13.2")
    no_gpu.setenv(devices.REQUESTED, "4")
    for use in (devices.best_device, lambda: join().__enter__()):
        with pytest.raises(ValueError, match="4 GPUs requested") as error:
            use()
        for part in (
            "for CUDA 13.2",
            "found version 12020",
            "driver is 535.183.01",
            "--torch-backend=auto",
            "gpus_per_node=0",
        ):
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def test_pytorch_build_without_cuda_is_reported(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.setattr(torch.version, "cuda", None)
    no_gpu.setenv(devices.REQUESTED, "1")
    with pytest.raises(ValueError, match=r"1 GPU requested .* is built without CUDA"):
        devices.best_device()


def test_rules_pass_the_gpu_request_to_the_stage(tmp_path: Path) -> None:
    line = [ROOT / "workflow/scripts/logged", "--gpus", "3", "logs/stage.log", sys.executable, "-c"]
    code = "import os; print(os.environ['IMAGE_DIFFUSION_GPUS'])"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([*line, code], cwd=tmp_path, capture_output=True, text=True, env={"PATH": path}, check=True)
    assert done.stdout.strip() == "3"


def card(patch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], built_for: list[str]) -> None:
    """Make PyTorch report a GPU of this compute capability and a build for these architectures."""
    for function, value in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_arch_list": built_for,
        "mem_get_info": (18 * 2**30, 24 * 2**30),
        "set_device": None,
        "is_bf16_supported": capability[0] >= 8,
    }.items():
        patch.setattr(torch.cuda, function, lambda *_, _value=value, **__: _value)


@pytest.mark.parametrize(
    ("name", "capability", "built_for", "runs"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), OF_CUDA_13, False),
        ("Tesla P100-PCIE-16GB", (6, 0), OF_CUDA_13, False),
        ("Tesla T4", (7, 5), OF_CUDA_13, True),
        ("NVIDIA RTX 4090", (8, 9), OF_CUDA_13, True),  # runs binaries for 8.6
        ("NVIDIA A100", (8, 0), ["sm_86", "sm_90"], False),
        ("NVIDIA H200", (9, 0), ["sm_90a"], True),
        ("a later one", (13, 0), OF_CUDA_13, True),  # from PTX
        ("a later one", (13, 0), ["sm_90", "sm_120"], False),
        ("NVIDIA A100", (8, 0), [], True),  # a build that lists no architectures
    ],
)
def test_gpu_without_kernels_in_this_build_ends_the_stage(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    devices._introduce.cache_clear()
    card(monkeypatch, name, capability, built_for)
    for use in (devices.best_device, lambda: join().__enter__()):
        if runs:
            use()
        else:
            with pytest.raises(ValueError, match=rf"^{name} has the compute capability {capability[0]}\.") as error:
                use()
            for part in (" ".join(built_for), "--torch-backend=auto", "CUDA_VISIBLE_DEVICES"):
                assert part in str(error.value)


def test_stage_describes_its_gpu_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    devices._introduce.cache_clear()
    card(monkeypatch, "NVIDIA RTX 4090", (8, 9), OF_CUDA_13)
    monkeypatch.setattr(devices, "driver", lambda: "580.65.06")
    assert devices.best_device() == devices.best_device() == GPU
    assert capfd.readouterr().err == "NVIDIA RTX 4090 (driver 580.65.06): 18.0 of 24.0 GiB of memory are free.\n"


@pytest.mark.parametrize(
    ("changes", "chosen"), [({}, "fp16"), ({"sharding": "optimizer"}, "fp16"), ({"sharding": "full"}, "float32")]
)
def test_bf16_is_replaced_on_gpus_without_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], changes: dict[str, str], chosen: str
) -> None:
    config = TrainConfig.model_validate({"steps": 1, "precision": "bf16", **changes})
    card(monkeypatch, "Tesla T4", (7, 5), OF_CUDA_13)
    assert config.on_hardware(World(0, 1, GPU)).precision == chosen
    assert f"this start computes in {chosen}" in capfd.readouterr().err
    assert config.on_hardware(World(0, 1, torch.device("cpu"))) is config


def test_sampling_uses_float32_on_gpus_without_bf16(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    card(monkeypatch, "Tesla T4", (7, 5), OF_CUDA_13)
    with computes_in("bf16", torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
    with computes_in("bf16", GPU):
        assert not torch.is_autocast_enabled("cuda")
    assert "Tesla T4 has no bf16" in capfd.readouterr().err


def test_one_gpu_without_bf16_changes_the_precision_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig.model_validate({"steps": 1, "precision": "bf16"})
    card(monkeypatch, "NVIDIA A100", (8, 0), OF_CUDA_13)
    assert config.on_hardware(World(0, 1, GPU)) is config
    monkeypatch.setattr(World, "any", lambda self, flag: True)
    assert config.on_hardware(World(1, 2, GPU)).precision == "fp16"


@pytest.mark.parametrize(
    ("device", "variable", "named"),
    [("cpu", "CXX", "neither g\\+\\+ nor clang"), ("cuda", "CC", "neither gcc nor clang")],
)
def test_compilation_without_a_compiler_fails_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, variable: str, named: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=named):
        check_compiler(torch.device(device))
    with pytest.raises(ValueError, match="compile needs a compiler"):
        compile_by_block(torch.nn.Linear(1, 1, device="meta"))
    (tmp_path / "compiler").touch(mode=0o755)
    monkeypatch.setenv(variable, "compiler -O1")
    check_compiler(torch.device(device))


@pytest.mark.parametrize("place", range(4))
def test_each_process_uses_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Slurm gives a job the GPUs 4 to 7 of a machine, which CUDA numbers from 0."""
    card(monkeypatch, "NVIDIA H200", (9, 0), OF_CUDA_13)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, value in {
        "SLURM_JOB_GPUS": "4,5,6,7",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": str(place),
    }.items():
        monkeypatch.setenv(name, value)
    with join() as world:
        assert world.device == torch.device("cuda", place)
    assert taken == [world.device]
