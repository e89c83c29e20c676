"""The prior on any number of processes, killed or not: the same bytes as on one, in strict mode."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from attempts import Attempt, Attempts, finished
from comparison import points, results

pytestmark = pytest.mark.slow


def test_prior_training_is_independent_of_number_of_processes(attempts: Attempts, tmp_path: Path) -> None:
    """53 pairs in batches of 12: the number of processes changes in the middle of epochs."""
    expected: tuple[object, object] | None = None
    for name, worlds in (("steady", [1, 1, 1, 1]), ("elastic", [1, 3, 2, 1])):
        folder = tmp_path / name
        folder.mkdir()
        for steps, processes in zip((4, 7, 11, 14), worlds, strict=True):
            changes = {
                "steps": steps,
                "schedule": {"type": "constant"},
                "deterministic": "strict",
                "validate_every_steps": 7,
                "log_every_steps": 1,
            }
            killed = attempts(Attempt(str(folder), "prior", processes, changes, kill_at_operation=12))
            assert -signal.SIGKILL in killed.codes
            finished(attempts, folder, system="prior", processes=processes, changes=changes)
        found = results(folder), [each for each in points(folder) if each[1] <= 14]
        expected = expected or found
        assert found == expected
