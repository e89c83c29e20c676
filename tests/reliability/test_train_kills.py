"""A training killed at any instants, any number of times, ends with the same bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, finished, fresh, killed_run
from comparison import results
from tiny_runs import SYSTEMS

pytestmark = pytest.mark.slow

CASES = [(system, processes, "none") for system in SYSTEMS for processes in (1, 2)]
CASES += [("mlp", 3, "optimizer"), ("dit", 2, "optimizer"), ("mlp", 2, "full")]
CASES += [("dit", 1, "augment"), ("dit", 2, "augment")]


@pytest.mark.parametrize(
    ("system", "processes", "setting"),
    [pytest.param(*case, marks=pytest.mark.smoke if case[1] == 1 else ()) for case in CASES],
)
def test_kills_at_random_instants_change_no_byte(
    attempts: Attempts, kills: int, tmp_path: Path, system: str, processes: int, setting: str
) -> None:
    changes = {"augment": {"probability": 0.5}} if setting == "augment" else {"sharding": setting}
    settings: dict[str, Any] = {"system": system, "processes": processes, "changes": changes}
    usual = finished(attempts, tmp_path / "undisturbed", **settings)
    expected = results(tmp_path / "undisturbed")
    draw, done = random.Random(f"{system} {processes} {setting}"), 0
    while done < -(-kills // len(CASES)):
        folder = fresh(tmp_path / "killed")
        done += killed_run(attempts, folder, draw, 8, usual, **settings)
        assert results(folder) == expected, f"after {done} kills"
