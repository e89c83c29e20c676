"""A training that is killed anywhere, any number of times, ends with the same bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, finished, fresh, killed_run
from comparison import results
from tiny_runs import SYSTEMS

CASES = [(system, processes, "none") for system in SYSTEMS for processes in (1, 2)]
CASES += [("mlp", 3, "optimizer"), ("dit", 2, "optimizer"), ("mlp", 2, "full")]


@pytest.mark.slow
@pytest.mark.parametrize(("system", "processes", "sharding"), CASES)
def test_kills_at_random_instants_change_no_byte(
    attempts: Attempts, kills: int, tmp_path: Path, system: str, processes: int, sharding: str
) -> None:
    settings: dict[str, Any] = {"system": system, "processes": processes, "changes": {"sharding": sharding}}
    usual = finished(attempts, tmp_path / "undisturbed", **settings)
    expected = results(tmp_path / "undisturbed")
    draw, done = random.Random(f"{system} {processes} {sharding}"), 0
    while done < -(-kills // len(CASES)):
        folder = fresh(tmp_path / "killed")
        done += killed_run(attempts, folder, draw, 8, usual, **settings)
        assert results(folder) == expected, f"after {done} kills"
