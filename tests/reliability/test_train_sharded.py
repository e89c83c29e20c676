"""Results are independent of sharding: the same numbers and checkpoints for any number of processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempt, Attempts, finished
from cases import each_system
from comparison import points, results
from safetensors.torch import load_file
from tiny_runs import TINY
from torch import Tensor
from torch.testing import assert_close

from image_diffusion.training.checkpoint.checkpoint import read_checkpoint
from image_diffusion.training.finetune import written

pytestmark = pytest.mark.slow

STEADY = {"schedule": {"type": "constant", "warmup_steps": 3}, "optimizer": {"type": "adamw", "lr": 1e-3}}
FULL = {"sharding": "full"}

STARTS = [("full", 2), ("none", 1), ("optimizer", 3), ("full", 3), ("none", 2), ("optimizer", 4), ("optimizer", 2)]
"""Sharding and number of processes of successive starts, two steps each."""


def tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the newest checkpoint, by group."""
    newest = max(folder.glob("train/state/*/step-*"))
    return read_checkpoint(newest)[0].groups


def assert_same(ours: Path, theirs: Path, loss: float = 1e-6, weight: float = 1e-5) -> None:
    """Check for equal losses, relatively, and equal tensors in the newest checkpoint, absolutely."""
    assert [point[:2] for point in points(ours)] == [point[:2] for point in points(theirs)]
    for (key, step, value), (_, _, other) in zip(points(ours), points(theirs), strict=True):
        assert value == pytest.approx(other, rel=loss), (key, step)
    own, other_own = tensors(ours), tensors(theirs)
    assert own.keys() == other_own.keys()
    for group in own.keys() - {"meter", "objective"}:
        assert_close(own[group], other_own[group], rtol=0, atol=weight, msg=lambda text, g=group: f"{g}: {text}")
    saved = load_file(ours / "train/weights.safetensors")
    assert_close(saved, written(own["network"] | own["best"], None), rtol=0, atol=0)


@pytest.mark.parametrize(("system", "microbatch"), [("mlp", None), ("dit", None), ("dit", 2)])
def test_sharded_run_gives_numbers_of_unsharded_one(
    attempts: Attempts, tmp_path: Path, system: str, microbatch: int | None
) -> None:
    changes = STEADY | {"steps": 8, "log_every_steps": 1, "microbatch": microbatch}
    finished(attempts, tmp_path / "none", system=system, processes=2, changes=changes)
    for sharding in ("full", "optimizer"):
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, system=system, processes=2, changes=settings, inject="half")
        assert_same(tmp_path / sharding, tmp_path / "none")


@pytest.mark.parametrize("system", ["mlp", "dit"])
def test_sharded_optimizer_is_bit_exact_in_strict_mode_on_any_number_of_processes(
    attempts: Attempts, tmp_path: Path, system: str
) -> None:
    """With an average, its best state, a limit of the norm and rates by parameter: all operations on shards."""
    changes = {"schedule": {"type": "constant"}, "deterministic": "strict", "lr_factors": {"*.bias": 2.0}}
    changes |= {"ema": {"type": "power"}, "grad_clip": 0.1}
    for name, worlds in {"slices": [3, 2, 4, 1], "steady": [1] * 4}.items():
        for i, processes in enumerate(worlds, start=1):
            settings = changes | {"steps": 3 * i, "sharding": "optimizer"}
            finished(attempts, tmp_path / name, system=system, processes=processes, changes=settings)
    assert points(tmp_path / "slices") == points(tmp_path / "steady")
    assert results(tmp_path / "slices") == results(tmp_path / "steady")


def test_sharding_within_each_of_two_machines_gives_numbers_of_one_process(attempts: Attempts, tmp_path: Path) -> None:
    """Sharded by all four processes it resumes, and by two on one machine; after a kill, with the same bytes."""
    changes = STEADY | {"log_every_steps": 1, "validate_every_steps": 2, "optimizer": MUON}
    machine = {"processes": 4, "inject": "two machines", "system": "dit"}
    starts = [("machine", machine), ("full", machine), ("machine", {"processes": 2, "system": "dit"})]
    for i, (sharding, settings) in enumerate(starts, start=1):
        given = changes | {"steps": 2 * i, "sharding": sharding}
        finished(attempts, tmp_path / "machines", changes=given, **settings)
        finished(attempts, tmp_path / "one", system="dit", changes=changes | {"steps": 2 * i})
    assert_same(tmp_path / "machines", tmp_path / "one", loss=1e-5)
    machine["changes"] = {"sharding": "machine"}
    usual = finished(attempts, tmp_path / "undisturbed", **machine)
    assert usual.operations is not None
    killed = attempts(Attempt(str(tmp_path / "killed"), kill_at_operation=usual.operations // 2, **machine))
    assert killed.codes[0] == -signal.SIGKILL
    finished(attempts, tmp_path / "killed", **machine)
    assert results(tmp_path / "killed") == results(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("divided", "precision", "system"),
    [("optimizer", "bf16", "dit"), ("optimizer", "fp16", "dit"), ("full", "bf16", "dit"), ("full", "bf16", "rin")],
)
def test_weights_rounded_once_give_numbers_of_autocast(
    attempts: Attempts, tmp_path: Path, divided: str, precision: str, system: str
) -> None:
    """Without a limit of the norm, whose last bits would differ. RIN's first pass is without gradient, and weights that
    were rounded in it get no gradient."""
    changes = STEADY | {"steps": 6, "precision": precision, "grad_clip": None}
    for sharding in ("none", divided):
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, system=system, processes=2, changes=settings)
    assert_same(tmp_path / divided, tmp_path / "none")


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_sums_in_bf16_give_nearly_the_same_numbers(attempts: Attempts, tmp_path: Path, sharding: str) -> None:
    changes = STEADY | {"steps": 6, "log_every_steps": 1, "sharding": sharding}
    for reduce in ("float32", "bf16"):
        finished(attempts, tmp_path / reduce, system="dit", processes=3, changes=changes | {"reduce": reduce})
    ours, exact = points(tmp_path / "bf16"), points(tmp_path / "float32")
    assert ours != exact
    assert [value for *_, value in ours] == pytest.approx([value for *_, value in exact], rel=1e-2)


def test_overflow_in_one_shard_skips_step_in_all_processes(attempts: Attempts, tmp_path: Path) -> None:
    """In fp16 the first steps overflow, here in the last weight alone: no process takes them."""
    changes = STEADY | {"steps": 8, "log_every_steps": 1, "precision": "fp16"}
    for sharding in ("none", "optimizer"):
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, processes=3, changes=settings, inject="overflow")
    assert_same(tmp_path / "optimizer", tmp_path / "none", loss=1e-4)
    taken = tensors(tmp_path / "optimizer")["optimizer"]["steps"]
    assert 0 < taken.max() == taken.min() < 8


MUON = {"type": "muon", "lr": 1e-4, "weight_decay": 0.1, "adamw": {"lr": 1e-3}}


def test_muon_updates_sharded_matrices_as_whole_ones(attempts: Attempts, tmp_path: Path) -> None:
    """Each process applies its rows of Muon's update, which all compute; three, so that rows are not divided evenly."""
    changes = STEADY | {"steps": 6, "log_every_steps": 1, "optimizer": MUON}
    for sharding in ("none", "full"):
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, system="dit", processes=3, changes=settings)
    assert_same(tmp_path / "full", tmp_path / "none")


@pytest.mark.parametrize("system", each_system(TINY))
def test_every_system_can_be_sharded(attempts: Attempts, tmp_path: Path, system: str) -> None:
    """Three processes, among which no number of rows is divided evenly. Objectives with layers of their own are not
    fully sharded: test_alignment.py."""
    changes = STEADY | {"steps": 6, "log_every_steps": 1, "optimizer": {"type": "adamw", "lr": 1e-3, "eps": 1e-3}}
    values = ["none", "optimizer", "full"][: 2 if system in {"aligned", "adversarial"} else 3]
    for sharding in values:
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, system=system, processes=3, changes=settings)
    for sharding in values[1:]:
        assert_same(tmp_path / sharding, tmp_path / "none", loss=1e-5)


def test_checkpoints_resume_with_or_without_sharding_on_any_number_of_processes(
    attempts: Attempts, tmp_path: Path
) -> None:
    for name, starts in {"changing": STARTS, "steady": [("none", 1)] * len(STARTS)}.items():
        for i, (sharding, processes) in enumerate(starts, start=1):
            changes = STEADY | {"steps": 2 * i, "sharding": sharding, "log_every_steps": 1, "validate_every_steps": 2}
            finished(attempts, tmp_path / name, processes=processes, changes=changes, inject="no dropout")
    assert len(list((tmp_path / "changing/train/state").glob("*/"))) == 1
    assert_same(tmp_path / "changing", tmp_path / "steady")


@pytest.mark.parametrize("lower", [{}, {"precision": "bf16", "grad_clip": None}], ids=["float32", "bf16"])
def test_first_process_alone_draws_previews_of_warm_start(
    attempts: Attempts, tmp_path: Path, lower: dict[str, str]
) -> None:
    """With weights in float32, whatever precision a step computes in."""
    finished(attempts, tmp_path / "given", changes={"seed": 1})
    changes = STEADY | {"steps": 8, "grid_every_steps": 3, "init_from": str(tmp_path / "given/train"), **lower}
    for sharding in ("none", "full", "optimizer"):
        settings = changes | {"sharding": sharding}
        finished(attempts, tmp_path / sharding, processes=2, changes=settings, inject="previews")
    for sharding in ("full", "optimizer"):
        drawn = [step for key, step, _ in points(tmp_path / sharding) if key == "validation/preview"]
        assert drawn == [0, 3, 6, 8]
        assert_same(tmp_path / sharding, tmp_path / "none")


@pytest.mark.parametrize(
    ("sharding", "processes", "lower"),
    [("full", 2, {}), ("optimizer", 3, {}), ("none", 3, {"reduce": "bf16"}), ("full", 2, {"reduce": "bf16"}),
     ("optimizer", 3, {"reduce": "bf16", "precision": "bf16"})],
)  # fmt: skip
def test_sharded_run_killed_or_stopped_resumes_bit_exactly(
    attempts: Attempts, tmp_path: Path, sharding: str, processes: int, lower: dict[str, str]
) -> None:
    settings: dict[str, Any] = {"processes": processes, "changes": {"sharding": sharding, **lower}}
    usual = finished(attempts, tmp_path / "undisturbed", **settings)
    assert usual.operations is not None
    killed = attempts(Attempt(str(tmp_path / "killed"), kill_at_operation=usual.operations // 2, **settings))
    assert killed.codes[0] == -signal.SIGKILL
    stop = Attempt(str(tmp_path / "killed"), inject="slow validation", since="waiting", **settings)
    stop.signals = [(0.1, signal.SIGTERM)]
    stopped = attempts(stop)
    assert stopped.codes == [75] * processes, stopped.output
    finished(attempts, tmp_path / "killed", **settings)
    assert results(tmp_path / "killed") == results(tmp_path / "undisturbed")


def test_process_killed_during_checkpoint_loses_nothing(attempts: Attempts, tmp_path: Path) -> None:
    """The second of two, at several of its file operations: every checkpoint that exists then is complete."""
    settings: dict[str, Any] = {"processes": 2, "changes": FULL}
    finished(attempts, tmp_path / "undisturbed", **settings)
    for operation in (2, 5, 8, 13, 17):
        killed = attempts(Attempt(str(tmp_path / "killed"), kill_at_operation=operation, killed=1, **settings))
        assert killed.codes[1] == -signal.SIGKILL, killed.output
        for path in (tmp_path / "killed").glob("train/state/*/step-*"):
            assert list(path.glob("*.1-of-2.*"))
            assert read_checkpoint(path)[0].step == int(path.name.removeprefix("step-"))
    finished(attempts, tmp_path / "killed", **settings)
    assert results(tmp_path / "killed") == results(tmp_path / "undisturbed")
    assert not list((tmp_path / "killed").glob("train/state/*/.*"))


def test_sharding_on_one_process_changes_no_result(attempts: Attempts, tmp_path: Path) -> None:
    finished(attempts, tmp_path / "none")
    for sharding in ("full", "optimizer"):
        finished(attempts, tmp_path / sharding, changes={"sharding": sharding})
        assert results(tmp_path / sharding, but=["sharding"]) == results(tmp_path / "none", but=["sharding"])


def test_global_batch_not_divisible_by_processes_is_refused(attempts: Attempts, tmp_path: Path) -> None:
    outcome = attempts(Attempt(str(tmp_path), processes=2, changes=FULL | {"global_batch": 13}))
    assert 0 not in outcome.codes
    assert "2 processes cannot share a global batch of 13 evenly" in outcome.output[0]
