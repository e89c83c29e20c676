"""Durations of tests are recorded, and slow tests are marked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from durations import merge, read_durations

LONGEST_S = 5


def test_tests_not_marked_slow_take_at_most_five_seconds(request: pytest.FixtureRequest) -> None:
    recorded = read_durations()
    unmarked = [item.nodeid for item in request.session.items if not item.get_closest_marker("slow")]
    too_long = {test: recorded[test] for test in unmarked if recorded.get(test, 0) > LONGEST_S}
    assert not too_long, "make them faster, or mark them with pytest.mark.slow"


def test_similar_durations_and_unmeasured_files_are_kept() -> None:
    recorded = {"a.py": 100, "a.py::test_gone": 9, "a.py::test_same": 10, "b.py": 3, "b.py::test_other": 3}
    files = {"a.py": 120.0, "c.py": 0.2}
    tests = {"a.py::test_same": 13.0, "a.py::test_new": 20.4, "c.py::test_short": 0.2}
    kept = {path: seconds for path, seconds in recorded.items() if path.startswith("b.py")}
    expected = {"a.py": 100, "a.py::test_same": 10, "a.py::test_new": 20, "c.py": 0}
    assert merge(recorded, files, tests) == kept | expected
    assert merge({}, {"a.py": 140.0}, {})["a.py"] == 140


TESTS = """
import subprocess, sys
import pytest

def compute():
    code = "import time; [None for _ in iter(lambda: time.process_time() < 1.2, False)]"
    subprocess.run([sys.executable, "-c", code], check=True)

@pytest.fixture(scope="module")
def shared():
    compute()

def test_with_the_shared_fixture(shared):
    pass

def test_with_a_child_process():
    compute()
"""


@pytest.mark.parametrize("options", [[], ["--numprocesses=1"]], ids=["one process", "workers"])
def test_child_processes_count_and_shared_fixtures_count_for_the_file_only(tmp_path: Path, options: list[str]) -> None:
    record = tmp_path / "durations.json"
    record.write_text("{}")
    (tmp_path / "test_two.py").write_text(TESTS)
    for name in ("conftest.py", "durations.py"):
        shutil.copy(Path(__file__).parents[1] / name, tmp_path)
    command = [sys.executable, "-m", "pytest", *options, "--record-durations=durations.json", "test_two.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    recorded = json.loads(record.read_text())
    assert set(recorded) == {"test_two.py", "test_two.py::test_with_a_child_process"}
    assert recorded["test_two.py"] > recorded["test_two.py::test_with_a_child_process"]
