"""Checkpoints by the clock: processes agree on them, and they change no byte of a training's results."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Attempts, finished
from comparison import points

pytestmark = pytest.mark.slow


def test_processes_save_together_by_clock(attempts: Attempts, tmp_path: Path) -> None:
    found = []
    for name, checkpoint in (("steps", {"every_steps": 4}), ("clock", {"every_steps": 100, "every_seconds": 1e-9})):
        changes = {"checkpoint": checkpoint | {"keep_last": 100}}
        finished(attempts, tmp_path / name, processes=2, changes=changes)
        weights = (tmp_path / name / "train" / "weights.safetensors").read_bytes()
        saved = sorted(int(path.name[5:]) for path in (tmp_path / name / "train" / "state").glob("*/step-*"))
        found.append((weights, points(tmp_path / name), saved))
    (by_steps, told, four), (by_clock, told_too, every) = found
    assert by_steps == by_clock and told == told_too
    assert four == [4, 8, 12, 13] and len(every) >= 6 and every[-1] == 13
