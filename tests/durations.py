"""Durations of tests, recorded in a file and read back: `pytest --record-durations tests/durations.json`.

The file maps each test file to the seconds of all its tests, and each test of a second or more to its own seconds. The
seconds are estimates for an idle machine: wall time less the time in which processes waited for a processor, but at
least the processor time that the test and its child processes used. A number stays while a new measurement is close to
it, so that recording again changes few lines. Record files as a whole: what was measured replaces a file's entries.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter  # bound here: a test may replace the clock in its module
from typing import Any

import pytest

RECORD = Path(__file__).with_name("durations.json")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PRESSURE = Path("/proc/pressure/cpu")
SHORTEST_S = 1.0
"""Tests below this are in the total of their file only."""
TOLERANCE = 0.3
"""The relative change below which a recorded number stays."""


def read_durations() -> dict[str, int]:
    """Return the recorded seconds by test file and by test id."""
    recorded: dict[str, int] = json.loads(RECORD.read_text(encoding="utf-8"))
    return recorded


def processor_seconds(pid: int | str = "self") -> float:
    """Return the processor seconds of a process, its ended children and its present descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it ended meanwhile: its parent has counted it
        return 0.0
    own = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    return own + sum(processor_seconds(child) for each in children for child in each)


def stalled_seconds() -> float:
    """Return the seconds since the start of the machine in which a process waited for a processor."""
    try:
        return int(PRESSURE.read_text().split()[4].removeprefix("total=")) / 1e6
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Instant:
    """The clocks at one moment, in seconds."""

    wall: float
    processor: float
    stalled: float

    @classmethod
    def now(cls) -> Instant:
        """Read the clocks."""
        return cls(perf_counter(), processor_seconds(), stalled_seconds())

    def elapsed(self) -> float:
        """Return the seconds since then, as an idle machine would take them."""
        now = Instant.now()
        wall = now.wall - self.wall
        return min(wall, max(now.processor - self.processor, wall - (now.stalled - self.stalled)))


class Recorder:
    """A pytest plugin that measures every test and writes the record when the session ends.

    With pytest-xdist the workers measure and the controller writes.
    """

    def __init__(self, path: Path) -> None:
        """path: the record."""
        self._path = path
        self._started = Instant.now()
        self._of_shared_fixtures = 0.0
        self._files: dict[str, float] = defaultdict(float)
        self._tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Start to measure a test."""
        self._started, self._of_shared_fixtures = Instant.now(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Measure the setup of a fixture that other tests share: it counts for the file, not for the test."""
        if fixturedef.scope == "function" or self._of_shared_fixtures < 0:
            return (yield)
        before, started, self._of_shared_fixtures = self._of_shared_fixtures, Instant.now(), -1.0
        try:
            return (yield)
        finally:
            self._of_shared_fixtures = before + started.elapsed()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Add the seconds so far to the report."""
        report = yield
        report.seconds = self._started.elapsed()
        report.own_seconds = max(0.0, report.seconds - self._of_shared_fixtures)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Collect the seconds of a test."""
        if report.when == "call":
            self._tests[report.nodeid] = report.own_seconds
        if report.when == "teardown":
            self._files[report.nodeid.partition("::")[0]] += report.seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record."""
        if not hasattr(session.config, "workerinput"):
            recorded = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
            there = {name: each for name, each in recorded.items() if Path(name.partition("::")[0]).exists()}
            merged = merge(there, dict(self._files), self._tests)
            self._path.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def merge(recorded: dict[str, int], files: dict[str, float], tests: dict[str, float]) -> dict[str, int]:
    """Return the record with the files that were measured replaced.

    recorded: seconds by test file and test id. files: seconds of each file that was measured, in full. tests: seconds
    of each of their tests.
    """
    measured = files | {test: seconds for test, seconds in tests.items() if seconds >= SHORTEST_S}
    kept = {name: seconds for name, seconds in recorded.items() if name.partition("::")[0] not in files}
    for name, seconds in measured.items():
        old = recorded.get(name)
        is_close = old is not None and abs(seconds - old) <= max(1.0, TOLERANCE * old)
        kept[name] = old if old is not None and is_close else round(seconds)
    return kept
