"""Every system trains on a GPU, is killed, and resumes bit-exactly in the modes that guarantee it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Attempt, Attempts, finished
from comparison import points, results
from tiny_runs import SYSTEMS, TINY, config
from torch._inductor.cudagraph_trees import get_manager

from image_diffusion.training.config import TrainConfig
from image_diffusion.training.optim.numerics import Mode, switches
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Trainer

GPU = World(0, 1, torch.device("cuda", 0))
SHORT: dict[str, Any] = {"steps": 8, "checkpoint": {"every_steps": 3}, "log_every_steps": 1}


def parts_of(system: str, **changes: Any) -> tuple[Trainer, TrainConfig]:
    torch.manual_seed(0)
    settings = config(**changes)
    return Trainer(SYSTEMS[system](GPU), settings, GPU), settings


def trained(training: tuple[Trainer, TrainConfig], steps: int, mode: str = "default") -> list[float]:
    """Return the losses of some steps. mode: PyTorch's reaction to waits for the device from the third step on."""
    parts, settings = training
    batches, losses = parts.batches(0), []
    with switches(settings.deterministic, settings.tf32, bool(settings.compile)):
        for step in range(1, steps + 1):
            examples = next(batches)
            torch.cuda.set_sync_debug_mode(mode if step > 2 else "default")  # the first steps allocate
            loss = parts.backward(examples, step)
            norm = parts.clip_gradients()
            parts.update(step)
            parts.observe(step, loss, norm)
            torch.cuda.set_sync_debug_mode("default")
            losses.append(loss.loss.mean())
    batches.close()  # type: ignore[attr-defined]
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("mode", "precision"), [("run", "float32"), ("run", "bf16"), ("strict", "float32")])
def test_killed_gpu_training_resumes_bit_exactly(
    attempts: Attempts, tmp_path: Path, system: str, mode: Mode, precision: str
) -> None:
    settings: dict[str, Any] = {"system": system, "changes": SHORT | {"deterministic": mode, "precision": precision}}
    usual = finished(attempts, tmp_path / "undisturbed", **settings)
    assert usual.operations is not None
    killed = attempts(Attempt(str(tmp_path / "killed"), kill_at_operation=usual.operations * 2 // 3, **settings))
    assert killed.codes == [-signal.SIGKILL], killed.output
    finished(attempts, tmp_path / "killed", **settings)
    assert results(tmp_path / "killed") == results(tmp_path / "undisturbed")


@pytest.mark.parametrize("system", ["mlp", "dit"])
def test_two_processes_on_one_gpu_equal_one_bit_exactly(attempts: Attempts, tmp_path: Path, system: str) -> None:
    changes = SHORT | {"deterministic": "strict"}
    for processes in (1, 2):
        finished(
            attempts, tmp_path / str(processes), system=system, processes=processes, changes=changes, inject="one gpu"
        )
    assert points(tmp_path / "2") == points(tmp_path / "1")
    assert results(tmp_path / "2") == results(tmp_path / "1")


@pytest.mark.parametrize(
    "spread",
    [*({"sharding": sharding} for sharding in ("none", "optimizer", "full")),
     {"sharding": "optimizer", "precision": "bf16", "compile": "cuda_graphs"}],
    ids=str,
)  # fmt: skip
def test_two_processes_on_one_gpu_give_nearly_the_same_numbers_as_one(
    attempts: Attempts, tmp_path: Path, spread: dict[str, Any]
) -> None:
    changes = SHORT | {"optimizer": {"type": "adamw", "lr": 1e-3}, "precision": spread.get("precision", "float32")}
    finished(attempts, tmp_path / "1", system="dit", changes=changes)
    finished(
        attempts,
        tmp_path / "2",
        system="dit",
        processes=2,
        changes=changes | spread,
        inject="one gpu",
    )
    tolerance = 1e-3 if changes["precision"] == "float32" else 3e-2
    for (key, step, value), (_, _, other) in zip(points(tmp_path / "2"), points(tmp_path / "1"), strict=True):
        assert value == pytest.approx(other, rel=tolerance), (key, step)


@pytest.mark.parametrize("system", TINY)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_host_does_not_wait_for_gpu_in_a_step(system: str, precision: str) -> None:
    trained(parts_of(system, precision=precision), 5, mode="error")


@pytest.mark.parametrize("system", TINY)
@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp16"}, {"tf32": True}], ids=str)
def test_lower_precision_gives_nearly_the_same_losses(system: str, changes: dict[str, Any]) -> None:
    optimizer = {"optimizer": {"type": "adamw", "lr": 1e-4}}
    exact = trained(parts_of(system, **optimizer), 4)
    ours = trained(parts_of(system, **optimizer, **changes), 4)
    assert ours == pytest.approx(exact, rel=3e-2)


@pytest.mark.parametrize("system", ["dit", "iddpm", "rin"])
def test_compiled_blocks_give_nearly_the_same_losses(system: str) -> None:
    optimizer = {"optimizer": {"type": "adamw", "lr": 1e-4}, "microbatch": None}
    exact = trained(parts_of(system, **optimizer), 4)
    assert trained(parts_of(system, **optimizer, compile=True), 4, mode="error") == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("system", ["dit", "rin", "dvae", "vector_dvae"])
@pytest.mark.parametrize("mode", ["off", "run"])
def test_cuda_graphs_give_nearly_the_same_losses(system: str, mode: str) -> None:
    """The first step warms up, the second is recorded, the others are replayed; each has two whole microbatches and a
    smaller one."""
    settings = {"optimizer": {"type": "adamw", "lr": 1e-4}, "microbatch": 5, "deterministic": mode}
    exact = trained(parts_of(system, **settings), 6)
    assert trained(parts_of(system, **settings, compile="cuda_graphs"), 6) == pytest.approx(exact, rel=1e-3)
    manager = get_manager(0, create_if_none_exists=False)
    assert manager is not None and list(manager.get_roots())


def test_losses_equal_those_of_cpu() -> None:
    alone = World(0, 1, torch.device("cpu"))
    torch.manual_seed(0)
    cpu = Trainer(SYSTEMS["dit"](alone), config(), alone)
    examples = next(cpu.batches(0))
    expected = cpu.losses(1, examples, 0).loss
    gpu, _ = parts_of("dit")
    torch.testing.assert_close(gpu.losses(1, next(gpu.batches(0)), 0).loss.cpu(), expected, rtol=1e-4, atol=1e-4)
