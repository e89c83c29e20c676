"""An orphaned training writes nothing once another has taken its place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempt, Attempts, Outcome, finished
from comparison import results

pytestmark = pytest.mark.slow

OTHER = {"optimizer": {"type": "adamw", "lr": 3e-3}}


@pytest.fixture(scope="module")
def others() -> Iterator[Attempts]:
    """A second server, which starts trainings in parallel with those of `attempts`."""
    with Attempts() as server:
        yield server


def held_at(point: str, folder: Path, attempts: Attempts, **changes: Any) -> Future[Outcome]:
    """Start a training that waits at a point for the file `go`. Return when it has reached the point."""
    attempt = Attempt(str(folder), inject=point, changes=changes)
    outcome = ThreadPoolExecutor(1).submit(attempts, attempt)
    until = time.monotonic() + 120
    while not (folder / "waiting").exists():
        assert time.monotonic() < until and not outcome.done(), outcome
        time.sleep(0.02)
    return outcome


@pytest.mark.parametrize("change", [OTHER, {"steps": 7}, {}], ids=["another rate", "fewer steps", "nothing"])
@pytest.mark.parametrize("point", ["held before the weights", "held before a checkpoint", "held before a picture"])
def test_orphaned_training_does_not_overwrite_its_successor(
    attempts: Attempts, others: Attempts, tmp_path: Path, point: str, change: dict[str, Any]
) -> None:
    finished(attempts, tmp_path / "undisturbed", changes=change, inject="previews")
    orphan = held_at(point, tmp_path / "shared", others)
    finished(attempts, tmp_path / "shared", changes=change, inject="previews")
    before = everything(tmp_path / "shared")
    (tmp_path / "shared" / "go").touch()
    outcome = orphan.result(timeout=120)
    assert outcome.codes == [1]
    assert "has taken over" in outcome.output[0]
    assert "this one ends without writing" in outcome.output[0]
    assert everything(tmp_path / "shared") == before
    assert results(tmp_path / "shared") == results(tmp_path / "undisturbed")


def everything(folder: Path) -> dict[str, bytes]:
    """Return every file of a training but the journals, of which each attempt has its own."""
    return {str(path): path.read_bytes() for path in (folder / "train").rglob("*") if path.is_file()}


@pytest.mark.parametrize("steps", [8, 9, 3])
def test_shortened_training_gives_weights_of_its_steps(attempts: Attempts, tmp_path: Path, steps: int) -> None:
    constant = {"schedule": {"type": "constant"}}
    finished(attempts, tmp_path / "undisturbed", changes={"steps": steps, **constant})
    finished(attempts, tmp_path / "longer", changes={"steps": 13, **constant})
    expected = results(tmp_path / "longer")
    finished(attempts, tmp_path / "longer", changes={"steps": steps, **constant})
    assert weights(tmp_path / "longer") == weights(tmp_path / "undisturbed")
    outcome = finished(attempts, tmp_path / "longer", changes={"steps": 13, **constant})
    assert weights(tmp_path / "longer")["weights.safetensors"] == expected["weights.safetensors"]
    assert "step 13" not in outcome.output[0]


def weights(folder: Path) -> dict[str, str]:
    found = results(folder)
    return {name: found[name] for name in ("weights.safetensors", "model.json")}
