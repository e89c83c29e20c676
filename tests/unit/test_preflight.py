"""What every process computes before the first step: known numbers, exact in every precision. Nothing of it stays."""

from __future__ import annotations

import pytest
import torch

from image_diffusion.training.parallel import preflight
from image_diffusion.training.parallel.preflight import Tried
from image_diffusion.training.parallel.world import World, join

ALONE = World(0, 1, torch.device("cpu"), hosts=("here",))
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_answer_is_exact_in_every_precision(dtype: torch.dtype) -> None:
    left, right, expected = preflight._exact_product(256, ALONE.device, torch.int64)
    assert torch.equal(left @ right.T, expected)
    assert (left.abs() @ right.abs().T).max() <= 256, "every part of a sum is a whole number that bf16 holds"
    assert torch.linalg.matrix_rank(left[:64].double()) == torch.linalg.matrix_rank(right[:64].double()) == 64
    preflight.check(ALONE, dtype)


def test_nothing_stays_of_it_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_what_trains_is_one_line_of_machines_that_are_alike() -> None:
    def gpus(host: str, name: str, driver: str) -> list[Tried]:
        return [Tried(host, f"GPU {i}, {name}", driver, True, True, 1e-3) for i in range(2)]

    found = [*gpus("n1", H100, "580.65.06"), *gpus("n2", H100, "580.65.06"), *gpus("n3", H100, "570.1")]
    assert preflight._hardware_line(found) == (
        f"Training with 6 processes: 2 x {H100} (driver 580.65.06) on each of n1, n2; 2 x {H100} (driver 570.1) on n3."
    )
    assert preflight._hardware_line(found[:1]) == f"Training with 1 process: 1 x {H100} (driver 580.65.06) on n1."


def test_the_median_process_is_the_measure_of_a_slow_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = [1e-3, 1.9e-3, 1.1e-3, 5.5e-3]

    def gather(found: list[Tried], mine: Tried, group: object) -> None:
        found[:] = [Tried("n1", f"GPU {i}, {H100}", "", True, True, each) for i, each in enumerate(seconds)]

    monkeypatch.setattr(preflight.dist, "all_gather_object", gather)
    monkeypatch.setattr(preflight.dist, "all_reduce", lambda tensor: tensor.mul_(1 + 2 + 3 + 4))
    preflight.check(World(0, 4, torch.device("cpu"), hosts=("n1",) * 4), torch.float32)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: A product takes 5.0 times as long as usual on n1 (process 3, GPU 3, {H100}), and every"
    )


def test_more_processes_than_gpus_are_refused_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4"), ("SLURMD_NODENAME", "n7")):
        monkeypatch.setenv(name, value)
    told = r"^4 processes cannot share the 2 GPUs of n7: each needs its own\. Set resources\.processes_per_node to 2 "
    with pytest.raises(ValueError, match=told), join():
        raise AssertionError("they met")
