"""Checkpoints: written atomically by one owner, verified by hash, and never taken from another run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from image_diffusion.core.config.base import differing_keys
from image_diffusion.core.files import atomic
from image_diffusion.core.files.atomic import atomic_write
from image_diffusion.core.files.weights import save_weights
from image_diffusion.training.checkpoint import checkpoint as written
from image_diffusion.training.checkpoint.checkpoint import (
    Background,
    Checkpoint,
    Damaged,
    read_checkpoint,
    write_checkpoint,
)
from image_diffusion.training.checkpoint.manager import State, part_writer
from image_diffusion.training.config import CheckpointConfig

IDENTITY = {"train": {"seed": 1, "optimizer": {"lr": 0.1}}, "system": {"type": "dit"}}


def checkpoint(step: int) -> Checkpoint:
    draw = torch.Generator().manual_seed(step)
    groups = {
        "network": {"weight": torch.randn(7, 5, generator=draw), "bias": torch.randn(5, generator=draw)},
        "ema-0.9": {"weight": torch.randn(7, 5, generator=draw)},
        "optimizer": {"steps": torch.tensor([float(step)]), "exp_avg/weight": torch.randn(7, 5, generator=draw)},
        "objective": {},
    }
    return Checkpoint(step, 32 * step, False, groups, {"precision": {"scale": 2.0**16}})


def part(step: int, number: int, count: int) -> Checkpoint:
    """Return the part of `checkpoint(step)` that one of several processes writes: its rows of sharded tensors."""
    whole = checkpoint(step)
    shared = {"network": "weight", "ema-0.9": "weight", "optimizer": "exp_avg/weight"}
    rows = {}
    for group, name in shared.items():
        share = -(-len(whole.groups[group][name]) // count)
        rows[group] = {name: whole.groups[group].pop(name)[number * share :][:share]}
    del whole.groups["ema-0.9"]
    return replace(whole, rows=rows, part=number, parts=count)


def save(owned: State, step: int, count: int, hang_s: float = 60.0) -> None:
    """Save a checkpoint as `count` processes, the first of which owns the folder."""
    others = [part_writer(owned.folder.parent, owned.fingerprint, owned.token, hang_s) for _ in range(1, count)]
    for number, other in reversed(list(enumerate(others, start=1))):
        other.save(part(step, number, count))
    owned.save(part(step, 0, count) if count > 1 else checkpoint(step))
    for each in (*others, owned):
        each.wait()


def state(root: Path, identity: dict[str, Any] = IDENTITY, **settings: Any) -> State:
    owned = State(root, identity, CheckpointConfig(**settings))
    owned.claim()
    return owned


def same(left: Checkpoint, right: Checkpoint) -> bool:
    plain = (left.step, left.examples_seen, left.reports_due, left.extra) == (
        (right.step, right.examples_seen, right.reports_due, right.extra)
    )
    if not plain or left.groups.keys() != right.groups.keys():
        return False
    return all(
        left.groups[group].keys() == right.groups[group].keys()
        and all(torch.equal(tensor, right.groups[group][name]) for name, tensor in left.groups[group].items())
        for group in left.groups
    )


def test_a_file_is_hashed_while_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next_is_written = threading.Event()
    save, hashed = written._save, written.sha256_file
    saved: list[Path] = []

    def save_and_tell(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        save(path, tensors)
        saved.append(path)
        if len(saved) == 2:
            next_is_written.set()

    def hash_late(path: Path) -> str:
        assert next_is_written.wait(30), "the next file waits for this one's hash"
        return hashed(path)

    monkeypatch.setattr(written, "_save", save_and_tell)
    monkeypatch.setattr(written, "sha256_file", hash_late)
    write_checkpoint(tmp_path, checkpoint(3), IDENTITY, {}, lambda: None)
    monkeypatch.undo()
    assert same(read_checkpoint(tmp_path / "step-0000003")[0], checkpoint(3))


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    owned = state(tmp_path)
    owned.save(checkpoint(3))
    owned.wait()
    found = state(tmp_path).load()
    assert found is not None
    assert same(found, checkpoint(3))


@pytest.mark.parametrize("count", [2, 3, 12])
def test_checkpoint_of_several_processes_is_read_as_one(tmp_path: Path, count: int) -> None:
    """Seven rows, so that shares are unequal and some of twelve processes have none."""
    owned = state(tmp_path)
    for step in (3, 4):
        save(owned, step, count)
    found = state(tmp_path).load()
    assert found is not None
    assert same(found, checkpoint(4))
    names = sorted(path.name for path in owned.checkpoints()[1].iterdir())
    assert len(names) == 4 + 3 * count and f"ema-0.9.1-of-{count}.safetensors" in names
    assert len(list(owned.folder.iterdir())) == 2


def test_a_part_may_be_taken_before_its_process_has_flushed_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process renames the folder as soon as it sees the record of the other part."""
    flush = atomic.sync_folder

    def late(folder: Path) -> None:
        while (folder / "part-1.json").exists() or (taken.is_set() and folder.exists()):
            taken.set()
            time.sleep(0.01)
        flush(folder)

    taken = threading.Event()
    owned = state(tmp_path)
    helper = part_writer(tmp_path, owned.fingerprint, owned.token, 60.0)
    owned.save(part(1, 0, 2))
    while not list(owned.folder.glob(".*/network.0-of-2.*")):
        time.sleep(0.01)
    time.sleep(0.1)  # now it waits for the other part
    monkeypatch.setattr(atomic, "sync_folder", lambda folder: late(folder) if on_helper() else flush(folder))
    main = set(threading.enumerate())

    def on_helper() -> bool:
        return threading.current_thread() not in main

    helper.save(part(1, 1, 2))
    helper.wait()
    owned.wait()
    assert taken.is_set()
    found = state(tmp_path).load()
    assert found is not None and same(found, checkpoint(1))


def test_checkpoint_missing_the_part_of_a_process_does_not_appear(tmp_path: Path) -> None:
    owned = State(tmp_path, IDENTITY, CheckpointConfig(), hang_s=0.2)
    owned.claim()
    save(owned, 1, 2)
    owned.save(part(2, 0, 2))
    with pytest.raises(ValueError, match="Process 1 has not written its part of the checkpoint of step 2 within 0 s"):
        owned.wait()
    assert [path.name for path in owned.folder.iterdir()] == ["step-0000001"]


def test_replaced_owner_stops_waiting_for_parts_at_once(tmp_path: Path) -> None:
    first = state(tmp_path)
    first.save(part(1, 0, 2))
    while not list(first.folder.glob(".*/*-of-2.*")):
        time.sleep(0.01)
    state(tmp_path)
    with pytest.raises(ValueError, match="has taken over"):
        first.wait()
    assert not list(first.folder.glob("step-*"))


def test_a_helper_whose_owner_was_replaced_writes_nothing(tmp_path: Path) -> None:
    first = state(tmp_path)
    orphan = part_writer(tmp_path, first.fingerprint, first.token, hang_s=0.2)
    second = state(tmp_path)
    orphan.save(part(1, 1, 2))
    save(second, 1, 1)
    with pytest.raises(ValueError, match="step 1 was not begun by the first process"):
        orphan.wait()
    assert [path.name for path in second.folder.iterdir()] == ["step-0000001"]


def test_folder_not_shared_by_all_machines_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.training.checkpoint.manager._SEEN_S", 0.0)
    owned = state(tmp_path / "one machine")
    for folder in (tmp_path / "another machine", state(tmp_path / "yet another").folder.parent):
        with pytest.raises(ValueError, match=r"is not the folder that the first process writes, .* all machines share"):
            part_writer(folder, owned.fingerprint, owned.token)


def test_waiting_thread_ends_with_the_process() -> None:
    waits = (
        "import threading; from pathlib import Path\n"
        "from image_diffusion.training.checkpoint.checkpoint import wait_for_path\n"
        "threading.Thread(target=lambda: print(wait_for_path(Path('never'), 600))).start()"
    )
    ended = subprocess.run([sys.executable, "-c", waits], timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_tensors_of_one_vector_are_copied_at_once(tmp_path: Path) -> None:
    vector = torch.arange(12.0)
    groups = {"network": {"a": vector[:4].view(2, 2), "b": vector[5:].as_strided((2, 3), (1, 2), 6)}, "meter": {}}
    taken = Checkpoint(1, 1, False, groups, rows={"network": {"c": vector[2:2], "d": torch.ones(2)}})
    copies: list[Checkpoint] = []
    writes = Background(copies.append)
    writes.save(taken)
    writes.wait()
    assert same(copies[0], taken)
    a, b, c, d = (tensor.untyped_storage().data_ptr() for tensor in (*copies[0].groups["network"].values(),
                                                                     *copies[0].rows["network"].values()))  # fmt: skip
    assert a == b == c != d and a != vector.untyped_storage().data_ptr()


def test_checkpoint_is_a_copy_from_the_time_of_saving(tmp_path: Path) -> None:
    owned, taken = state(tmp_path), checkpoint(3)
    owned.save(taken)
    taken.groups["network"]["weight"].zero_()
    owned.wait()
    found = owned.load()
    assert found is not None
    assert same(found, checkpoint(3))


def test_the_same_checkpoint_has_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        owned = state(tmp_path / name)
        owned.save(checkpoint(3))
        owned.wait()
    left, right = sorted(tmp_path.glob("a/*/step-*/*")), sorted(tmp_path.glob("b/*/step-*/*"))
    assert len(left) == 5
    assert [path.read_bytes() for path in left] == [path.read_bytes() for path in right]


def damaged(folder: Path, others: list[Path], draw: random.Random) -> str:
    """Damage a checkpoint in one way, and return which."""
    path = draw.choice(sorted(folder.iterdir()))
    kind = draw.choice(
        ["truncate", "extend", "flip", "delete", "swap within", "swap between", "rename", "empty", "json"]
    )
    match kind:
        case "truncate":
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        case "extend":
            path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 9)))
        case "flip":
            data = bytearray(path.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(data))
        case "delete":
            path.unlink()
        case "swap within":
            first, second = draw.sample(sorted(folder.glob("*.safetensors")), 2)
            first_bytes = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(first_bytes)
        case "swap between":
            names = ["network.safetensors", "optimizer.safetensors", "checkpoint.json"]
            name = draw.choice(names)
            shutil.copy(draw.choice(others) / name, folder / name)
        case "rename":
            other = draw.choice(others)
            shutil.rmtree(folder)
            shutil.copytree(other, folder)
        case "empty":
            shutil.rmtree(folder)
            folder.mkdir()
        case "json":
            record = json.loads((folder / "checkpoint.json").read_text())
            record[draw.choice(["step", "examples_seen"])] += draw.randint(1, 5)
            (folder / "checkpoint.json").write_text(json.dumps(record))
    return kind


@pytest.mark.parametrize("count", [1, 2])
def test_300_damaged_checkpoints_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    owned = state(tmp_path / "whole", keep_last=3)
    for step in (1, 2, 3):
        save(owned, step, count)
    draw, kinds = random.Random(0), set()
    for i in range(300):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "copy")
        copy = state(tmp_path / "copy")
        first, second, third = copy.checkpoints()
        kinds.add(damaged(third, [first, second], draw))
        if i % 3 == 0:
            damaged(second, [first], draw)
        found = copy.load()
        assert found is not None
        assert same(found, checkpoint(1 if i % 3 == 0 else 2)), i
        assert "is damaged: " in capsys.readouterr().err
        assert not third.exists()
    assert len(kinds) == 9


def test_run_with_only_damaged_checkpoints_starts_from_scratch(tmp_path: Path) -> None:
    owned = state(tmp_path)
    owned.save(checkpoint(1))
    owned.wait()
    (owned.checkpoints()[0] / "network.safetensors").unlink()
    assert owned.load() is None


@pytest.mark.parametrize("change", range(3))
def test_the_checkpoint_of_another_configuration_is_refused_with_the_keys(tmp_path: Path, change: int) -> None:
    other = json.loads(json.dumps(IDENTITY))
    [other["train"], other["train"]["optimizer"], other["system"]][change][["seed", "lr", "type"][change]] = "else"
    theirs = state(tmp_path, other)
    theirs.save(checkpoint(4))
    theirs.wait()
    ours = state(tmp_path)
    assert theirs.folder != ours.folder
    theirs.checkpoints()[0].rename(ours.folder / "step-0000004")
    key = ["train.seed", "train.optimizer.lr", "system.type"][change]
    with pytest.raises(ValueError, match=rf"belongs to another configuration: {key} \(.* here, 'else' there\)"):
        ours.load()


def test_training_with_another_split_is_not_resumed(tmp_path: Path) -> None:
    def state_of(split: str) -> State:
        owned = State(tmp_path, IDENTITY, CheckpointConfig(), split=split)
        owned.claim()
        return owned

    for split in ("", "one"):  # "": as written by an earlier version
        owned = state_of(split)
        owned.save(checkpoint(1))
        owned.wait()
        assert same(state_of("one").load() or checkpoint(0), checkpoint(1))
    with pytest.raises(ValueError, match=rf"held out other images: .* or remove {tmp_path} to train anew"):
        state_of("another").load()


def test_training_from_scratch_reports_the_reason_and_the_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = state(tmp_path, {"train": {"seed": 2}, "system": {"type": "dit"}, "classes": ["cat"] * 1000})
    ours = State(tmp_path, IDENTITY, CheckpointConfig())
    for step in (0, 4):
        earlier.save(checkpoint(step))
        earlier.wait()
        assert ours.load() is None
        assert ("this training starts at step 0" in (note := capsys.readouterr().err)) == (step == 4)
    assert "one: train.seed (1 here, 2 there); train.optimizer ({'lr': 0.1} here, None there); classes (None " in note
    assert note.endswith(f"The earlier one, of 4 steps, stays in {earlier.folder} (docs/extend_training.md).\n")
    assert len(note.splitlines()) == 1 and len(note) < 500 + len(str(tmp_path))
    earlier.load()
    (earlier.checkpoints()[-1] / "checkpoint.json").write_text("{}")
    assert ours.load() is None
    assert capsys.readouterr().err == ""


def test_differing_keys_name_both_values() -> None:
    assert differing_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}) == [
        "a.c (2 here, None there)",
        "a.d (None here, 3 there)",
    ]


@pytest.mark.parametrize(
    ("keep_every", "kept"), [(None, ["step-0000008", "step-0000009"]), (3, [f"step-000000{i}" for i in (3, 6, 8, 9)])]
)
def test_old_checkpoints_are_removed(tmp_path: Path, keep_every: int | None, kept: list[str]) -> None:
    owned = state(tmp_path, keep_last=2, keep_every=keep_every)
    for step in range(1, 10):
        owned.save(checkpoint(step))
    owned.wait()
    assert [path.name for path in owned.checkpoints()] == kept
    assert sorted(path.name for path in owned.folder.iterdir()) == kept


@pytest.mark.parametrize("identity", [IDENTITY, {"train": {"seed": 2}}], ids=["alike", "another"])
def test_replaced_owner_ends_without_writing(tmp_path: Path, identity: dict[str, Any]) -> None:
    first = state(tmp_path, identity)
    first.save(checkpoint(1))
    first.wait()
    second = state(tmp_path)
    second.save(checkpoint(1))
    with pytest.raises(ValueError, match=r"has taken over .*; this one ends without writing"):
        first.save(checkpoint(2))
    second.save(checkpoint(2))
    second.wait()
    assert len(second.checkpoints()) == 2


def test_owner_reports_replacement_when_its_successor_removed_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, replaced, save_file = threading.Event(), threading.Event(), safetensors.torch.save_file

    def slowly(*args: Any) -> None:
        begun.set()
        assert replaced.wait(60)
        save_file(*args)

    first = state(tmp_path)
    monkeypatch.setattr(safetensors.torch, "save_file", slowly)
    first.save(checkpoint(1))
    assert begun.wait(60)
    state(tmp_path)
    replaced.set()
    with pytest.raises(ValueError, match=r"has taken over .*; this one ends without writing"):
        first.wait()


def test_owner_replaced_while_writing_leaves_no_files(tmp_path: Path) -> None:
    def replaced() -> None:
        raise ValueError("taken over")

    with pytest.raises(ValueError, match="taken over"):
        write_checkpoint(tmp_path, checkpoint(1), IDENTITY, {}, replaced)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_not_replaced_without_permission(tmp_path: Path) -> None:
    def refused() -> None:
        raise ValueError("taken over")

    save_weights(tmp_path, {"a": torch.zeros(2)}, {})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="taken over"):
        save_weights(tmp_path, {"a": torch.ones(2)}, {}, refused)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_checkpoints_past_the_end_are_kept_but_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = state(tmp_path, keep_last=3)
    for step in (4, 8, 13):
        longer.save(checkpoint(step))
    longer.wait()
    shorter = State(tmp_path, IDENTITY, CheckpointConfig(keep_last=1), num_steps=8)
    shorter.claim()
    found = shorter.load()
    assert found is not None and found.step == 8
    assert "also holds step-0000013, past the 8 steps asked for" in capsys.readouterr().err
    shorter.save(checkpoint(8))
    shorter.wait()
    assert [path.name for path in longer.checkpoints()] == ["step-0000008", "step-0000013"]


def test_partial_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "train" / "state"
    first = state(root)
    first.save(checkpoint(1))
    first.wait()
    other = root / "another-run"
    left = [
        other / ".step-0000002.tmp",
        root / ".owner.json.x.tmp",
        tmp_path / "train/.weights.safetensors.x.tmp",
        tmp_path / "train/previews/another-run/.step-0000002.npz.x.tmp",
    ]
    (left[0] / "network").mkdir(parents=True)
    for path in left[1:]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    kept = other / "step-0000001"
    kept.mkdir()
    with atomic_write(tmp_path / "train/model.json"):
        owned = state(root)
        assert not any(path.exists() for path in left)
        assert len(list((tmp_path / "train").glob(".model.json.*.tmp"))) == 1  # being written now
    assert kept.exists() and [path.name for path in owned.checkpoints()] == ["step-0000001"]


def test_failed_write_reports_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned = state(tmp_path)
    owned.save(checkpoint(1))
    owned.wait()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("image_diffusion.training.checkpoint.checkpoint._save", full)
    owned.save(checkpoint(2))
    with pytest.raises(OSError, match=r"step 2 could not be written .*No space left.*State kept in .*step-0000001"):
        owned.wait()
    assert [path.name for path in owned.checkpoints()] == ["step-0000001"]


def test_checkpoint_in_the_folder_of_another_step_is_damaged(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, checkpoint(1), IDENTITY, {}, lambda: None)
    with pytest.raises(Damaged, match="it holds step 1"):
        read_checkpoint(written.rename(tmp_path / "step-0000002"))
