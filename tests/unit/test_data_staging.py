"""Staging: shards are copied to a node's disk and read from there, while training proceeds."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crops import crops_of_twelve
from image_diffusion.core.files import store
from image_diffusion.data.shards import remote
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.staging import begin_staging
from image_diffusion.stages import train
from image_diffusion.training.parallel.world import place_on_node

TRAIN = """
experiment: near
codec: {type: rgb}
system: {type: dit, network: {depth: 1, width: 16, num_heads: 2, patch: 4}}
train: {steps: 3, global_batch: 4, validate_every_steps: null, grid_every_steps: null}
preview: {}
"""


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crops_of_twelve(tmp_path_factory.mktemp("crops"), num_shards=4)


def read_from(folder: Path) -> set[str]:
    """Return the files of a folder that this process has memory-mapped."""
    maps = Path("/proc/self/maps").read_text()
    return {path.rpartition("/")[2] for path in re.findall(rf"{folder}/\S+", maps)}


def everything(shards: Shards) -> torch.Tensor:
    return shards.gather(np.arange(shards.num_samples))


def staged(sets: list[Shards], folder: Path, part: float = 0.0) -> None:
    copying = begin_staging(sets, str(folder), part)
    assert copying is not None
    copying.join()


def test_shards_are_read_from_staged_copies(tmp_path: Path, crops: Path) -> None:
    shards = open_shards(crops, in_background=True)
    before, entries = everything(shards), shards.manifest["shards"]
    assert read_from(crops) and not read_from(tmp_path)
    staged([shards], tmp_path / "near", 0.5)
    assert read_from(tmp_path / "near") == {entry["sha256"] for entry in entries}
    assert not read_from(crops)
    assert torch.equal(everything(shards), before)


def test_concurrent_reads_are_unaffected_by_staging(tmp_path: Path, crops: Path) -> None:
    shards = open_shards(crops, in_background=True)
    before, done, others = everything(shards), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            if not torch.equal(everything(shards), before):
                others.append(1)

    reading = threading.Thread(target=read)
    reading.start()
    for attempt in range(20):
        staged([shards], tmp_path / f"near-{attempt}")
    done.set()
    reading.join()
    assert not others


def test_existing_copies_are_used_and_damaged_copies_are_replaced(
    tmp_path: Path, crops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [open_shards(crops, "train"), open_shards(crops, "validation")]
    first, second, *_ = (entry["sha256"] for entry in both[0].manifest["shards"])
    staged(both, tmp_path)
    (tmp_path / first).write_bytes(bytes((tmp_path / first).stat().st_size))
    copied: list[str] = []
    download: Callable[..., None] = remote._download
    monkeypatch.setattr(remote, "_download", lambda *asked: (copied.append(asked[2]), download(*asked)))
    again = open_shards(crops, in_background=True)
    staged([again], tmp_path)
    assert copied == [first] and second in read_from(tmp_path)
    assert torch.equal(everything(again), everything(open_shards(crops)))


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("$NOWHERE_AT_ALL/x", "the environment variable NOWHERE_AT_ALL is not set on this node. Set it"),
        ("{file}/x", "which cannot be made: Not a directory. Name a folder of the node's own disk"),
    ],
)
def test_unusable_staging_folders_are_rejected_before_any_work(
    tmp_path: Path, crops: Path, folder: str, said: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=re.escape(said)):
        begin_staging([open_shards(crops)], folder.format(file=tmp_path / "file"))


def test_too_small_disk_is_reported_as_a_note(
    tmp_path: Path, crops: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert begin_staging([open_shards(crops)], str(tmp_path)) is None
    assert re.fullmatch(
        r"note: shards are read in place: .* has 0\.0 GB free, and the shards take .* GB\.\n",
        capsys.readouterr().err,
    )


def test_full_disk_stops_staging_but_not_reading(
    tmp_path: Path, crops: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote, "_download", full)
    monkeypatch.setattr(store, "_WAITS_S", ())
    shards = open_shards(crops, in_background=True)
    before = everything(shards)
    staged([shards], tmp_path)
    assert "note: shards are read in place: " in (said := capsys.readouterr().err)
    assert "No space left on device" in said and torch.equal(everything(shards), before)


def test_processes_of_a_node_start_at_different_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_on_node() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert place_on_node() == 0.75


def test_training_gives_the_same_weights(tmp_path: Path, crops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    monkeypatch.setenv("NEAR", str(tmp_path / "near"))
    weights = []
    for name, more in (("far", []), ("near", ["--stage-to", "$NEAR"]), ("empty", ["--stage-to", ""])):
        output = tmp_path / name / "weights.safetensors"
        asked = ["--config", str(tmp_path / "train.yaml"), "--data", f"{crops}/manifest.json", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["train", *asked, *more])
        train.main()
        weights.append(output.read_bytes())
    assert weights[0] == weights[1] == weights[2]
    assert (tmp_path / "near").is_dir()
