"""Files of a stage are flushed to disk before they are renamed, so that a power cut loses none."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import atomic_folder, write_text
from image_diffusion.experiments.experiment import ExportConfig, ExportStage
from image_diffusion.stages import export, sample
from tiny_models import write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "reliability"))


@dataclass
class Recorder:
    """Records flushes and renames below a folder, and faults in their order."""

    root: Path
    faults: list[str] = field(default_factory=list)
    flushed: dict[tuple[int, int], Any] = field(default_factory=dict)
    """State when last flushed, by device and inode: a file's modification time, a folder's entries."""
    renamed: set[Path] = field(default_factory=set)

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        self.flushed[found.st_dev, found.st_ino] = _entries(descriptor) if is_folder else found.st_mtime_ns

    def is_flushed(self, path: Path) -> bool:
        """Return whether a file's content, or a folder's entries, are on disk. Removals need not be."""
        found = path.stat()
        flushed = self.flushed.get((found.st_dev, found.st_ino))
        return flushed is not None and _entries(path) <= flushed if path.is_dir() else flushed == found.st_mtime_ns

    def rename(self, source: Path, target: Path) -> None:
        """Record a rename: everything inside must be on disk."""
        if not target.is_relative_to(self.root) or target.name.startswith("."):
            return
        inside = [source, *source.rglob("*")] if source.is_dir() else [source]
        self.faults += [
            f"{target}: {path} is renamed before it is flushed" for path in inside if not self.is_flushed(path)
        ]
        self.renamed.add(target)

    def check(self) -> None:
        """Check that nothing was renamed too early and that every present entry is on disk."""
        shown = [path for path in self.root.rglob("*") if not any(part.startswith(".") for part in _parts(self, path))]
        folders = {path.parent for path in shown}
        self.faults += [f"the entries of {folder} are not flushed" for folder in folders if not self.is_flushed(folder)]
        self.faults += [f"{path} is not flushed" for path in shown if path.is_file() and not self.is_flushed(path)]
        assert not self.faults, "\n".join(self.faults)
        assert self.renamed


def _entries(folder: Any) -> set[tuple[str, int]]:
    """Return names and inodes of the visible entries of a folder."""
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries if not entry.name.startswith(".")}


def _parts(recorder: Recorder, path: Path) -> tuple[str, ...]:
    return path.relative_to(recorder.root).parts


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Recorder of flushes and renames below tmp_path/made."""
    recorder = Recorder(tmp_path / "made")
    fsync = os.fsync

    def flushes(descriptor: int) -> None:
        fsync(descriptor)
        recorder.fsync(descriptor)

    def renames(call: Any) -> Any:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            recorder.rename(Path(source), Path(target))
            call(source, target, **options)

        return renamed

    monkeypatch.setattr(os, "fsync", flushes)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renames(getattr(os, name)))
    recorder.root.mkdir()
    yield recorder


def test_training_files_are_flushed_before_they_are_renamed(recorder: Recorder) -> None:
    importlib.import_module("tiny_runs").start(recorder.root / "run", steps=8)
    assert list((recorder.root / "run/train/state").glob("*/step-*/*.safetensors"))
    assert list((recorder.root / "run/journal/train").glob("attempt-*.jsonl"))
    recorder.check()


def test_samples_are_flushed_before_they_are_renamed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    _sample(recorder.root, monkeypatch)
    assert (recorder.root / "samples/samples.npz").is_file()
    recorder.check()


def test_export_is_flushed_before_it_is_renamed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    _export(recorder.root, monkeypatch)
    assert (recorder.root / "diffusers/README.md").is_file()
    recorder.check()


def test_recorder_detects_unflushed_files(recorder: Recorder) -> None:
    (recorder.root / "new").mkdir()
    (recorder.root / "new/file").write_text("text")
    (recorder.root / "new/file").rename(recorder.root / "new/named")
    with pytest.raises(AssertionError, match="renamed before it is flushed"):
        recorder.check()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_weights_states_samples_and_exports_follow_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """safetensors itself writes files that only their owner may read."""
    before = os.umask(mask)
    try:
        importlib.import_module("tiny_runs").start(tmp_path / "run", steps=4)
        _sample(tmp_path / "other", monkeypatch)
        _export(tmp_path / "other", monkeypatch)
        with atomic_folder(tmp_path / "folder") as written:
            (written / "inner").mkdir()
            (written / "inner/private").touch(0o600)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".npz", ".md", ".jsonl"}
    modes = {str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert {name: mode for name, mode in modes.items() if mode != oct(0o666 & ~mask)} == {}


def _sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder, step=4)
    given = ["--weights", folder / "train/weights.safetensors", "--config", folder / "config/sample.yaml"]
    given += ["--set", "sample.num_samples=4", "--output", folder / "samples/samples.npz"]
    monkeypatch.setattr(sys, "argv", ["sample", *map(str, given), "--journal", str(folder / "journal")])
    sample.main()


def _export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder, step=4)
    write_text(folder / "export.yaml", to_yaml(dump(ExportStage(export=ExportConfig(format="pipeline")))))
    given = ["--config", folder / "export.yaml", "--weights", folder / "train/weights.safetensors"]
    monkeypatch.setattr(sys, "argv", ["export", *map(str, given), "--output", str(folder / "diffusers")])
    export.main()
