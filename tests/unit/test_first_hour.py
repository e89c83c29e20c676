"""The script for the first hour on a GPU, with fake steps: its page is updated after every step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import first_hour  # noqa: E402 - beside the tests for GPUs
from first_hour import PLAN, SLICE_S, Step  # noqa: E402


def step(name: str, code: str, limit_s: int = 20) -> Step:
    return Step(name, 1, limit_s, f"about {name}", (sys.executable, "-c", code))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "has_device", lambda: False)


def test_first_hour_without_a_gpu_ends_with_one_line(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        first_hour.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU here" in line
    assert not (tmp_path / "out").exists()


def test_first_hour_starts_without_pytorch() -> None:
    code = f"import sys; sys.path.insert(0, {str(GPU)!r}); import first_hour; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plan_fits_into_slices_of_nine_minutes(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--plan"])
    first_hour.main()
    printed = capsys.readouterr().out
    assert [planned.slice for planned in PLAN] == sorted(planned.slice for planned in PLAN)
    for number in (1, 2, 3):
        mine = [planned for planned in PLAN if planned.slice == number]
        assert sum(planned.limit_s for planned in mine) <= SLICE_S
        assert f"slice {number}: {sum(planned.limit_s for planned in mine)} s" in printed
        assert all(f" {planned.name} " in printed and planned.about in printed for planned in mine)


def test_steps_refer_to_existing_tests_and_benchmarks() -> None:
    tests = "".join(path.read_text() for path in GPU.glob("test_*.py"))
    bench = (GPU / "bench_gpu.py").read_text()
    for planned in PLAN:
        words = planned.command
        assert (GPU.parents[1] / next(word for word in words if word.endswith(".py"))).is_file()
        for option, word in pairwise(words):
            if option == "-k":
                assert any(word in line for line in tests.splitlines() if line.startswith("def test_")), word
            if option == "--only":
                assert f"def bench_{word}(" in bench


def test_failed_and_hanging_steps_do_not_stop_others(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '77.31']); print('begun', flush=True); time.sleep(60)"
    report = "print('a.py::one PASSED\\n[gw0] [ 50%] FAILED a.py::two\\n| a rate | 5 | images/s | 0.60 | |')"
    steps = [step("fails", f"{report}; raise SystemExit(1)"), step("hangs", child, limit_s=1), step("passes", "")]
    began = time.monotonic()
    results = first_hour.run(steps, tmp_path)
    assert time.monotonic() - began < 20
    assert [results[name].status for name in ("fails", "hangs", "passes")] == ["failed", "out of time", "passed"]
    assert results["fails"].tests == {"passed": 1, "failed": 1}
    page = (tmp_path / "page.md").read_text()
    assert "| a rate | 5 | images/s | 0.60 | |" in page and "1 passed, 1 failed" in page and "begun" in page
    assert subprocess.run(["pgrep", "-f", "^sleep 77.31$"], check=False, capture_output=True).returncode == 1


def test_page_counts_passed_and_failed_tests(tmp_path: Path) -> None:
    """With the repository's pytest options, one of which reduces the output."""
    written = tmp_path / "test_two.py"
    written.write_text("def test_one(): ...\ndef test_two(): assert False\n")
    command = [str(written) if word.endswith(".py") else word for word in first_hour.tests("test_gpu_pieces")]
    serial = [word for word in command if not word.startswith("--numprocesses")]
    result = first_hour.take(Step("two", 1, 60, "", (*serial, "-c", "pyproject.toml")), tmp_path / "log")
    assert result.tests == {"passed": 1, "failed": 1}


def test_slices_on_several_machines_make_one_page(tmp_path: Path) -> None:
    steps = [replace(step(f"of-{number}", ""), slice=number) for number in (1, 2, 3)]
    for number in (1, 3):
        first_hour.run(steps, tmp_path, number)
    page = (tmp_path / "page.md").read_text()
    assert all(line in page for line in ("| of-1 | passed |", "| of-2 | not run yet |", "| of-3 | passed |"))


def test_page_has_all_steps_before_a_kill(tmp_path: Path) -> None:
    """A restart continues with the step that was killed."""
    names = ["one", "two", "three"]
    for index, killed in enumerate(names):
        output = tmp_path / killed
        once = (
            f"import os, pathlib; there = pathlib.Path({str(tmp_path / f'{killed}.was')!r}); first = not there.exists()"
        )
        kill = f"{once}; there.touch(); first and os.kill(os.getppid(), 9)"
        steps = [step(name, kill if name == killed else f"print('| {name} | 1 | |')") for name in names]
        begin = f"import sys; sys.path.insert(0, {str(GPU)!r}); from pathlib import Path; import first_hour; "
        begin += f"from first_hour import Step; first_hour.run({steps!r}, Path({str(output)!r}))"
        ended = subprocess.run([sys.executable, "-c", begin], capture_output=True, check=False)
        assert ended.returncode == -signal.SIGKILL
        record, page = output / "steps.json", output / "page.md"
        told = json.loads(record.read_text()) if record.exists() else {}
        assert list(told) == names[:index]
        assert all(result["status"] == "passed" for result in told.values())
        for name in names[:index]:
            assert f"| {name} | passed |" in page.read_text()
        if index:
            assert f"| {killed} | not run yet |" in page.read_text()
        subprocess.run([sys.executable, "-c", begin], capture_output=True, check=True)
        assert list(json.loads(record.read_text())) == names
