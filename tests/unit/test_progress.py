"""Progress of a stage: lines in a log, a bar in a terminal."""

from __future__ import annotations

import re
import time

import pytest

from image_diffusion.core.process import progress as module
from image_diffusion.core.process.progress import Progress


def test_log_has_lines_at_the_start_at_intervals_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    with Progress("train", 2000, "step", initial=1000) as progress:
        for _ in range(500):
            progress.advance()
        time.sleep(0.06)
        progress.advance(500, "loss 0.1234")
    start, *_, end = lines = capsys.readouterr().err.splitlines()
    assert start == "train: 1,000 of 2,000 steps (50%)"
    assert re.fullmatch(r"train: 2,000 of 2,000 steps \(100%\), [\d.]+ steps/s, 00:00 left, loss 0.1234", end)
    assert 2 <= len(lines) < 10


def test_log_interval_grows_with_the_running_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with Progress("train", 100_000, "step") as progress:
        for _ in range(3600):
            now[0] += 1
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    counts = [int(line.split()[1].replace(",", "")) for line in lines]
    assert counts[:4] == [0, 10, 20, 30] and counts[-3] - counts[-4] == 60
    assert len(counts) < 100


def test_job_name_prefixes_lines_of_concurrent_jobs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.VARIABLE, "demo/train")
    for title in ("train", "features of samples"):
        with Progress(title, 0, "step"):
            pass
    lines = dict.fromkeys(capsys.readouterr().err.splitlines())
    assert list(lines) == [
        "demo/train: 0 of 0 steps (0%)",
        "demo/train: features of samples: 0 of 0 steps (0%)",
    ]


def test_progress_of_zero_items_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("crop", 0, "image"):
        pass
    assert set(capsys.readouterr().err.splitlines()) == {"crop: 0 of 0 images (0%)"}


def test_nested_progress_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 1, "step") as outer:
        with Progress("sample", 1, "image") as inner:
            inner.advance()
        outer.advance()
    titles = [re.match(r"(\w+): \d of 1 (step|image)s", line) for line in capsys.readouterr().err.splitlines()]
    assert [title and title[1] for title in titles] == ["train", "sample", "sample", "train"]


def test_terminal_shows_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("sample", 4, "image") as progress:
        progress.advance(4)
    assert "sample: 100%|" in capsys.readouterr().err
