"""The preflight check of every process: known numbers, exact in every precision. It leaves no state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from image_diffusion.training.config import TrainConfig
from image_diffusion.training.parallel import preflight
from image_diffusion.training.parallel.preflight import PreflightResult
from image_diffusion.training.parallel.world import World, join
from image_diffusion.training.trainer import Trainer

ALONE = World(0, 1, torch.device("cpu"), hosts=("here",))
H100 = "NVIDIA H100 80GB HBM3"


class MovedError(Exception):
    """Raised when a network is moved to a GPU."""

    @staticmethod
    def to(network: torch.nn.Module, device: torch.device) -> None:
        raise MovedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_check_product_is_exact_in_every_precision(dtype: torch.dtype) -> None:
    left, right, expected = preflight._exact_product(256, ALONE.device, torch.int64)
    assert torch.equal(left @ right.T, expected)
    assert (left.abs() @ right.abs().T).max() <= 256, "every part of a sum is a whole number that bf16 holds"
    assert torch.linalg.matrix_rank(left[:64].double()) == torch.linalg.matrix_rank(right[:64].double()) == 64
    preflight.check(ALONE, dtype)


def test_preflight_check_changes_no_state_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def kept() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
        ]

    before = kept()
    preflight.check(ALONE, torch.float32)
    assert kept() == before
    assert capfd.readouterr() == ("", "")


def test_hardware_line_groups_identical_machines() -> None:
    def gpus(host: str, name: str, driver: str) -> list[PreflightResult]:
        return [PreflightResult(host, f"GPU {i}, {name}", driver, True, True, 1e-3) for i in range(2)]

    found = [*gpus("n1", H100, "580.65.06"), *gpus("n2", H100, "580.65.06"), *gpus("n3", H100, "570.1")]
    assert preflight._hardware_line(found) == (
        f"Training with 6 processes: 2 x {H100} (driver 580.65.06) on each of n1, n2; 2 x {H100} (driver 570.1) on n3."
    )
    assert preflight._hardware_line(found[:1]) == f"Training with 1 process: 1 x {H100} (driver 580.65.06) on n1."


def test_slow_process_is_reported_relative_to_the_median(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = [1e-3, 1.9e-3, 1.1e-3, 5.5e-3]

    def gather(found: list[PreflightResult], mine: PreflightResult, group: object) -> None:
        found[:] = [PreflightResult("n1", f"GPU {i}, {H100}", "", True, True, each) for i, each in enumerate(seconds)]

    monkeypatch.setattr(preflight.dist, "all_gather_object", gather)
    monkeypatch.setattr(preflight.dist, "all_reduce", lambda tensor: tensor.mul_(1 + 2 + 3 + 4))
    preflight.check(World(0, 4, torch.device("cpu"), hosts=("n1",) * 4), torch.float32)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: A product takes 5.0 times as long as usual on n1 (process 3, GPU 3, {H100}), and every"
    )


@pytest.mark.parametrize(
    ("processes", "sharding", "needs"),
    [(1, "none", 16), (4, "none", 16), (4, "optimizer", 10), (4, "full", 4), (1, "full", 16)],
)
def test_gpu_without_enough_free_memory_is_rejected_before_use(
    processes: int, sharding: str, needs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2**30 weights take 4 GiB, as do their gradient and each of two averages; sharded weights start unsharded. Nothing
    is allocated."""
    with torch.device("meta"):
        network = torch.nn.Linear(2**14, 2**16, bias=False)
    world = World(0, processes, torch.device("cuda", 0), hosts=("here",) * processes)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needs * 2**30, 80 * 2**30))
    preflight.check_memory(world, network, 2, sharding)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needs * 2**30 - 1, 80 * 2**30))
    with pytest.raises(ValueError, match=rf"need {needs}.0 GiB, but only {needs}.0 of 80.0 GiB of {H100} are free"):
        preflight.check_memory(world, network, 2, sharding)


def test_frozen_weights_need_no_gradient_and_no_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9 + 1 layers of 256 KiB the last is trained: only its gradient and its average add to the weights."""
    network = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(10)))
    freeze = {"init_from": "weights", "freeze": [f"{i}.*" for i in range(9)]}
    config = TrainConfig.model_validate({"steps": 1, "ema": {"rates": [0.9]}, **freeze})
    world = World(0, 1, torch.device("cuda", 0), hosts=("here",))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(torch.nn.Module, "to", MovedError.to)
    objective = SimpleNamespace(layers={}, pairs_samples=False, teacher=None)
    task: Any = SimpleNamespace(network=network, objective=objective, validation=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 2**18, 2**30))
    with pytest.raises(MovedError):
        Trainer(task, config, world)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 2**18 - 1, 2**30))
    with pytest.raises(ValueError, match="Weights, gradient and averages need"):
        Trainer(task, config, world)


def test_memory_is_not_checked_on_a_cpu() -> None:
    preflight.check_memory(ALONE, torch.nn.Linear(2, 2), 1, "none")


def test_more_processes_than_gpus_are_rejected_before_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4"), ("SLURMD_NODENAME", "n7")):
        monkeypatch.setenv(name, value)
    told = r"^4 processes cannot share the 2 GPUs of n7: each needs its own\. Set resources\.processes_per_node to 2 "
    with pytest.raises(ValueError, match=told), join():
        raise AssertionError("they met")
