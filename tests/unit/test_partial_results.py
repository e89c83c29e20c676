"""Batches of an interrupted stage are reused, unless its settings, inputs or code have changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_diffusion.core.files import partial_results
from image_diffusion.core.files.partial_results import Arrays, batches, partial_folder, resumable


class StoppedError(Exception):
    pass


class Work:
    """Computes batches 0 … 4 of an output and records which it has computed."""

    def __init__(self, folder: Path) -> None:
        self.output, self.made = folder / "out.json", list[int]()

    def start(self, given: Any = 1, inputs: Any = (), of: Any = "squares", stop_before: int | None = None) -> list[int]:
        """Return the batches: the squares of their numbers."""
        found = []
        with resumable(self.output, given, inputs):
            once = batches(of)
            for number in range(5):
                if number == stop_before:
                    raise StoppedError
                found.append(int(once(str(number), self._maker(number))["square"][0]))
        return found

    def _maker(self, number: int) -> Callable[[], Arrays]:
        def make() -> Arrays:
            self.made.append(number)
            return {"square": np.array([number**2])}

        return make


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Work with three of five batches computed from a file and a folder, and an empty record."""
    work = Work(tmp_path)
    (tmp_path / "in.npz").write_text("in")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in.npy").write_text("in")
    with pytest.raises(StoppedError):
        work.start(inputs=inputs(tmp_path), stop_before=3)
    work.made.clear()
    return work


def inputs(folder: Path) -> list[Path | None]:
    return [folder / "in.npz", folder / "folder", folder / "missing", None]


def test_finished_batches_are_reused_and_deleted_at_the_end(
    work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder" / ".verified.json").write_text("a note of somebody who has read it")
    assert work.start(inputs=inputs(tmp_path)) == [0, 1, 4, 9, 16] and work.made == [3, 4]
    assert "out.json: 3 of 5 batches are reused from an earlier run" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.npz"]
    work.start(inputs=inputs(tmp_path))
    assert work.made == [3, 4, 0, 1, 2, 3, 4] and not capsys.readouterr().out


@pytest.mark.parametrize("changed", ["given", "of", "file", "folder", "code"])
def test_batches_of_other_inputs_or_code_are_not_reused(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    told: dict[str, Any] = {"given": {"given": 2}, "of": {"of": "other squares"}}.get(changed, {})
    if changed == "file":
        (tmp_path / "in.npz").write_text("other")
    elif changed == "folder":
        os.utime(tmp_path / "folder" / "in.npy", (1, 1))
    elif changed == "code":
        monkeypatch.setattr(partial_results, "code_below", lambda folder: "another")
    work.start(inputs=inputs(tmp_path), **told)
    assert work.made == [0, 1, 2, 3, 4]
    assert not partial_folder(work.output).exists(), "neither that of the other work"


def test_damaged_batch_is_recomputed(work: Work, tmp_path: Path) -> None:
    (path,) = partial_folder(work.output).glob("*/1.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (path.with_name("2.npz")).write_bytes(b"")
    assert work.start(inputs=inputs(tmp_path)) == [0, 1, 4, 9, 16]
    assert 0 not in work.made and 2 in work.made and {3, 4} <= set(work.made)


def test_second_computation_of_one_name_has_its_own_batches(tmp_path: Path) -> None:
    with resumable(tmp_path / "out.json", {}):
        first, second = (batches("images of a set") for _ in range(2))
        assert first("0", lambda: {"a": np.array([1])})["a"] == [1]
        assert second("0", lambda: {"a": np.array([2])})["a"] == [2]
        assert first("0", lambda: {"a": np.array([3])})["a"] == [1]
    assert batches("images of a set")("0", lambda: {"a": np.array([4])})["a"] == [4], "kept by nobody"
