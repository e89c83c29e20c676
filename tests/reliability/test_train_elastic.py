"""Results are independent of the number of processes: the same samples, the same noise, the same loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attempts import Attempts, finished
from cases import each_system
from comparison import points, results
from safetensors.torch import load_file
from tiny_runs import TINY

pytestmark = pytest.mark.slow

WORLDS = [1, 2, 4, 3, 1]
"""Number of processes of successive starts, four steps each; 53 samples in batches of 12: always within an epoch."""


def trained(attempts: Attempts, folder: Path, worlds: list[int], deterministic: str) -> list[str]:
    """Train 20 steps, split evenly over the starts. Return the drawn random numbers, a line per sample."""
    folder.mkdir()
    drawn = []
    inject = "no dropout" if deterministic == "off" else None
    for i, processes in enumerate(worlds, start=1):
        changes = {
            "steps": 20 * i // len(worlds),
            "schedule": {"type": "constant", "warmup_steps": 3},
            "deterministic": deterministic,
            "log_every_steps": 1,
            "validate_every_steps": 20,
        }
        finished(
            attempts, folder, processes=processes, changes=changes, inject=inject, drawn=str(folder / f"drawn-{i}")
        )
        lines = (folder / f"drawn-{i}").read_text().splitlines()
        drawn += sorted(lines)
    return drawn


@pytest.mark.parametrize("deterministic", ["off", "strict"])
def test_any_number_of_processes_mid_epoch(attempts: Attempts, tmp_path: Path, deterministic: str) -> None:
    drawn = trained(attempts, tmp_path / "elastic", WORLDS, deterministic)
    same = trained(attempts, tmp_path / "steady", [1] * len(WORLDS), deterministic)
    assert drawn == same
    assert len(drawn) == 20 * 12
    elastic, steady = points(tmp_path / "elastic"), points(tmp_path / "steady")
    assert [point[:2] for point in elastic] == [point[:2] for point in steady]
    if deterministic == "strict":
        assert elastic == steady
        assert results(tmp_path / "elastic") == results(tmp_path / "steady")
    else:
        for (key, step, value), (_, _, other) in zip(elastic, steady, strict=True):
            assert value == pytest.approx(other, rel=1e-6), (key, step)


def test_strict_mode_runs_with_more_processes_than_chunks(attempts: Attempts, tmp_path: Path) -> None:
    changes = {"deterministic": "strict", "strict_chunk": 6}
    for name, worlds in {"elastic": [4, 3, 1], "steady": [1, 1, 1]}.items():
        for i, processes in enumerate(worlds, start=1):
            finished(attempts, tmp_path / name, processes=processes, changes=changes | {"steps": 4 * i})
    assert points(tmp_path / "elastic") == points(tmp_path / "steady")
    assert results(tmp_path / "elastic") == results(tmp_path / "steady")


def test_warm_start_is_identical_in_every_process(attempts: Attempts, tmp_path: Path) -> None:
    """Averages too: all processes validate with them."""
    finished(attempts, tmp_path / "given", changes={"seed": 1})
    changes = {
        "steps": 3,
        "init_from": str(tmp_path / "given/train"),
        "ema": {"type": "exponential", "rates": [0.9]},
        "deterministic": "strict",
        "validate_every_steps": 1,
    }
    for processes in (1, 2):
        finished(attempts, tmp_path / str(processes), processes=processes, changes=changes)
    assert points(tmp_path / "2") == points(tmp_path / "1")


def test_strict_mode_writes_same_files_as_one_process(attempts: Attempts, tmp_path: Path) -> None:
    """Including the running means in a checkpoint, which a resumed training would hide."""
    changes = {"steps": 3, "deterministic": "strict", "log_every_steps": 2}
    for processes in (1, 2):
        finished(attempts, tmp_path / str(processes), processes=processes, changes=changes)
    assert results(tmp_path / "2") == results(tmp_path / "1")


@pytest.mark.parametrize("optimizer", ["muon", "lion"])
def test_optimizers_are_independent_of_number_of_processes(attempts: Attempts, tmp_path: Path, optimizer: str) -> None:
    changes = {
        "schedule": {"type": "power", "constant_steps": 2},
        "optimizer": {"type": optimizer, "lr": 1e-3},
        "deterministic": "strict",
        "validate_every_steps": 8,
    }
    for name, worlds in {"elastic": [2, 1], "steady": [1, 1]}.items():
        for i, processes in enumerate(worlds, start=1):
            steps = {"steps": 4 * i}
            finished(attempts, tmp_path / name, system="dit", processes=processes, changes=changes | steps)
    assert results(tmp_path / "elastic") == results(tmp_path / "steady")


@pytest.mark.parametrize("deterministic", ["run", "strict"])
def test_a_codebook_follows_the_encodings_of_all_processes(
    attempts: Attempts, tmp_path: Path, deterministic: str
) -> None:
    """Also of 5 processes, which share a batch of 12 unevenly; unused codes restart at the same encodings."""
    changes = {"deterministic": deterministic, "strict_chunk": 2, "validate_every_steps": 6}
    for name, worlds in {"elastic": [5, 1], "steady": [1, 1]}.items():
        for i, processes in enumerate(worlds, start=1):
            steps = {"steps": 3 * i}
            finished(attempts, tmp_path / name, system="vector_dvae", processes=processes, changes=changes | steps)
    if deterministic == "strict":
        assert results(tmp_path / "elastic") == results(tmp_path / "steady")
    codes, same = (
        load_file(tmp_path / name / "train/weights.safetensors")["codebook.weight"] for name in ("elastic", "steady")
    )
    torch.testing.assert_close(codes, same, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("system", each_system(TINY))
def test_systems_are_independent_of_number_of_processes(attempts: Attempts, tmp_path: Path, system: str) -> None:
    """Averages too (D-37): RIN's original updates them in the first process only, by that process's count."""
    changes = {
        "schedule": {"type": "constant", "warmup_steps": 3},
        "deterministic": "strict",
        "validate_every_steps": 8,
    }
    for name, worlds in {"elastic": [3, 1], "steady": [1, 1]}.items():
        for i, processes in enumerate(worlds, start=1):
            steps = {"steps": 4 * i}
            finished(attempts, tmp_path / name, system=system, processes=processes, changes=changes | steps)
    assert results(tmp_path / "elastic") == results(tmp_path / "steady")
    assert points(tmp_path / "elastic") == points(tmp_path / "steady")
