"""Signals, non-finite losses, dead processes, full disks, clock jumps: each is reported and recovered from."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempt, Attempts, finished
from comparison import results

from image_diffusion.core.journal.reader import read_journal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(attempts: Attempts, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Results of undisturbed runs, by number of processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for processes in (1, 2):
        finished(attempts, folder / str(processes), processes=processes)
    return {processes: results(folder / str(processes)) for processes in (1, 2)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("processes", [1, 2])
def test_signal_in_long_validation_saves_and_next_start_resumes(
    attempts: Attempts,
    tmp_path: Path,
    expected: dict[int, dict[str, str]],
    number: int,
    processes: int,
) -> None:
    slow = Attempt(str(tmp_path), processes=processes, inject="slow validation")
    slow.since, slow.signals = "waiting", [(0.1, number)]
    outcome = attempts(slow)
    assert outcome.codes == [75] * processes, outcome.output
    assert outcome.seconds < 13
    assert f"stopped: asked by {signal.Signals(number).name}; step" in outcome.output[0]
    finished(attempts, tmp_path, processes=processes)
    assert results(tmp_path) == expected[processes]
    stopped, went_on = sorted((tmp_path / "journal/train").glob("attempt-*.jsonl"))
    stopped.unlink()
    history = read_journal(went_on.parent)
    assert history is not None and len(history.damaged) == 1, "what the first attempt logged is missed"


def test_all_processes_stop_when_one_gets_signal(
    attempts: Attempts, tmp_path: Path, expected: dict[int, dict[str, str]]
) -> None:
    outcome = attempts(
        Attempt(str(tmp_path), processes=2, changes={"steps": 10**6, "schedule": {"type": "constant"}},
                since="journal/train/attempt-0001.jsonl", signals=[(0.3, signal.SIGTERM)], victim=1)
    )  # fmt: skip
    assert outcome.codes == [75, 75], outcome.output
    assert "stopped: asked by another process" in outcome.output[0]
    assert "stopped: asked by SIGTERM" in outcome.output[1]


def test_a_second_signal_ends_at_once(attempts: Attempts, tmp_path: Path) -> None:
    outcome = attempts(
        Attempt(str(tmp_path), inject="slow step", since="waiting", signals=[(n, signal.SIGTERM) for n in (0.1, 1.1)])
    )
    assert outcome.codes == [128 + signal.SIGTERM]
    assert outcome.seconds < 10


def test_max_hours_stops_in_time(attempts: Attempts, tmp_path: Path) -> None:
    changes = {"steps": 10**6, "schedule": {"type": "constant"}, "max_hours": 2 / 3600}
    outcome = attempts(Attempt(str(tmp_path), changes=changes, inject="clock jumps"))
    assert outcome.codes == [75], outcome.output
    assert 2.0 <= outcome.seconds < 12.0
    assert "stopped: asked by train.max_hours" in outcome.output[0]


@pytest.mark.parametrize(
    ("processes", "changes"),
    [(1, {"deterministic": "off"}), (2, {"deterministic": "off"}), (1, {"deterministic": "strict"}),
     (2, {"deterministic": "strict"}), (2, {"sharding": "full"})],
)  # fmt: skip
def test_nonfinite_loss_stops_with_last_finite_loss_and_kept_state(
    attempts: Attempts, tmp_path: Path, processes: int, changes: dict[str, str]
) -> None:
    settings: dict[str, Any] = {"processes": processes, "changes": changes}
    outcome = attempts(Attempt(str(tmp_path / "ill"), inject="nan", **settings))
    assert 1 in outcome.codes, outcome.output
    message = next(line for line in outcome.output[0].splitlines() if line.startswith("error: "))
    assert "Loss is not finite at step " in message
    assert "Last finite: 1." in message or "Last finite: 0." in message
    assert "State kept in" in message and message.endswith("step-0000004.")
    finished(attempts, tmp_path / "ill", **settings)
    finished(attempts, tmp_path / "well", **settings)
    assert results(tmp_path / "ill") == results(tmp_path / "well")


def test_dead_process_ends_others_and_next_start_resumes(
    attempts: Attempts, tmp_path: Path, expected: dict[int, dict[str, str]]
) -> None:
    dead = Attempt(str(tmp_path), processes=2, inject="slow validation", since="waiting", kill_after_s=0.1, victim=1)
    codes = attempts(dead).codes
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    finished(attempts, tmp_path, processes=2)
    assert results(tmp_path) == expected[2]


def test_preview_may_take_longer_than_hang_s(attempts: Attempts, tmp_path: Path) -> None:
    outcome = attempts(Attempt(str(tmp_path), processes=2, changes={"grid_every_steps": 10}, inject="slow previews"))
    assert outcome.codes == [0, 0], outcome.output


@pytest.mark.parametrize(("processes", "sharding"), [(1, "none"), (2, "full")])
def test_full_disk_is_reported_and_next_start_resumes(
    attempts: Attempts, tmp_path: Path, processes: int, sharding: str
) -> None:
    settings: dict[str, Any] = {"processes": processes, "changes": {"sharding": sharding}}
    outcome = attempts(Attempt(str(tmp_path / "full"), inject="full disk", **settings))
    assert 1 in outcome.codes, outcome.output
    assert any("error: The checkpoint of step 4 could not be written in" in each for each in outcome.output)
    assert not list(tmp_path.glob("full/train/state/*/step-*"))
    for name in ("full", "empty"):
        finished(attempts, tmp_path / name, **settings)
    assert results(tmp_path / "full") == results(tmp_path / "empty")


def test_a_clock_that_jumps_changes_nothing(attempts: Attempts, tmp_path: Path) -> None:
    changes = {"max_hours": 1.0}
    outcome = attempts(Attempt(str(tmp_path / "jumps"), inject="clock jumps", changes=changes))
    assert outcome.codes == [0], outcome.output
    finished(attempts, tmp_path / "steady", changes=changes)
    assert results(tmp_path / "jumps") == results(tmp_path / "steady")
