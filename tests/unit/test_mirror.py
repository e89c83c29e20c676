"""A project, its mirror in a folder, and a second disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crops import crops_of_twelve
from image_diffusion.core.files import mirrored
from image_diffusion.core.files.atomic import atomic_folder, write_json
from image_diffusion.core.files.checksums import damaged
from image_diffusion.core.files.mirrored import CHUNK, MirroredFile, chunk_of, place_of
from image_diffusion.core.files.store import Store
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.tools.mirror import prune
from image_diffusion.training.checkpoint.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from image_diffusion.workflow.damage import Damage
from image_diffusion.workflow.mirror import restore
from image_diffusion.workflow.mirror.lease import Head, Lease, TakenError
from image_diffusion.workflow.mirror.mirror_process import MirrorConfig
from image_diffusion.workflow.mirror.restore import ConflictError, DiskState
from image_diffusion.workflow.mirror.snapshot import Project, Sender, take

RECORD = "metadata/cmVzdWx0cy94L21vZGVsLmpzb24="  # results/x/model.json


class Machine:
    """A machine with a project folder and a lease on the mirror."""

    def __init__(self, root: Path, store: Store, silence_s: float = 0.1) -> None:
        self.project = Project(Path("results"), root)
        self.root, self.said = root, list[str]()
        self.lease = Lease(store, silence_s)
        (root / "results").mkdir(parents=True, exist_ok=True)

    def begin(self, folders: tuple[str, ...] = ("x",)) -> Sender:
        known = DiskState.read(self.project, self.lease.store.url)
        is_own = self.lease.take(known.token, self.said.append)
        return restore.restore(self.project, self.lease, known, is_own, lambda: list(folders), self.said.append)

    def write(self, name: str, data: bytes) -> Path:
        path = self.project.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def content(self) -> dict[str, tuple[bytes, int]]:
        names = take(self.project, {}).stamps
        paths = {name: self.project.path(name) for name in names}
        return {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in paths.items()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/bucket")


@pytest.fixture
def first(tmp_path: Path, store: Store) -> Machine:
    return Machine(tmp_path / "first", store)


@pytest.fixture
def second(tmp_path: Path, store: Store) -> Machine:
    return Machine(tmp_path / "second", store)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat files of over 1,000 bytes as large."""
    monkeypatch.setattr(restore, "SMALL", 1000)
    yield
    mirrored._read.cache_clear()


def test_second_disk_restores_files_with_their_times(first: Machine, second: Machine) -> None:
    sender = first.begin()
    first.write("results/x/model.json", b"{}")
    first.write("results/x/journal/train/attempt-0001.jsonl", b"1\n2\n")
    first.write("results/x/empty", b"")
    first.write(RECORD, b"{}")
    first.write("results/x/.verified.json", b"{}")
    first.write("results/x/.unfinished.tmp", b"x")
    os.utime(first.project.path("results/x/model.json"), ns=(10**18, 10**18 + 7))
    assert sender.round()
    assert not sender.round()
    second.begin()
    assert second.content() == first.content()
    assert set(second.content()) == {
        *("results/x/model.json", "results/x/journal/train/attempt-0001.jsonl", "results/x/empty"),
        RECORD,
    }


def test_only_new_chunks_are_sent_and_unreferenced_chunks_are_removed(first: Machine, store: Store) -> None:
    sender = first.begin()
    data = np.random.default_rng(0).bytes(2 * CHUNK + 5)
    first.write("results/x/a", data)
    first.write("results/x/b", data)
    sender.round()
    hashes = [hashlib.sha256(data[i : i + CHUNK]).hexdigest() for i in range(0, len(data), CHUNK)]
    chunks = {chunk_of(sha256, first.lease.token) for sha256 in hashes}
    assert chunks < store.names("blobs").keys()
    assert len(store.names("blobs")) == 4  # and the list
    before = inodes(store)
    first.write("results/x/c", data + b"more")
    sender.round()
    assert {name: inode for name, inode in inodes(store).items() if name in chunks} == {
        name: before[name] for name in chunks
    }
    for name in ("a", "b", "c"):
        first.project.path(f"results/x/{name}").unlink()
    sender.round()
    assert chunks < store.names("blobs").keys()  # kept until the next head names a snapshot without them
    sender.round()
    assert len(store.names("blobs")) == 1


def inodes(store: Store) -> dict[str, int]:
    """The inode of each chunk."""
    return {path.name: path.stat().st_ino for path in Path(store.url.removeprefix("file://"), "blobs").iterdir()}


def test_suspended_machine_removes_no_chunks_of_another(
    first: Machine, second: Machine, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = first.begin()
    first.write("results/x/old", b"the same bytes")
    sender.round()
    first.project.path("results/x/old").unlink()
    sender.round()
    frozen = sender._obsolete
    assert frozen
    other = second.begin()
    second.write("results/x/again", b"the same bytes")
    other.round()
    sender._remove()
    third = Machine(tmp_path / "third", store)
    third.begin()
    assert (third.root / "results/x/again").read_bytes() == b"the same bytes"


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data.replace(b"snapshot", b"snapshut")])
def test_damaged_head_falls_back_to_an_older_snapshot(
    first: Machine, second: Machine, store: Store, damage: Callable[[bytes], bytes]
) -> None:
    sender = first.begin()
    first.write("results/x/a", b"a")
    sender.round()
    first.write("results/x/b", b"b")
    sender.round()
    number, _ = first.lease.newest()
    data = store.get(f"heads/{number:010}")
    assert data is not None
    store.put(f"heads/{number:010}", damage(data))
    second.begin()
    assert second.said[0].startswith("note: another process has not left")
    assert (second.root / "results/x/a").read_bytes() == b"a"


def test_lost_file_list_is_reported(first: Machine, second: Machine, store: Store) -> None:
    sender = first.begin()
    first.write("results/x/a", b"a")
    sender.round()
    first.write("results/x/b", b"b")
    sender.round()
    (chunk,) = first.lease.snapshot
    store.delete([place_of(chunk)])
    second.begin()
    assert "the newest snapshot cannot be read, and one before it is used" in second.said[-1]
    assert (second.root / "results/x/a").read_bytes() == b"a"


def damage_head(store: Store, number: int) -> None:
    path = f"heads/{number:010}"
    data = store.get(path)
    assert data is not None
    store.put(path, data[:-9])


def test_new_mirror_with_lost_file_list_is_not_empty(first: Machine, second: Machine, store: Store) -> None:
    sender = first.begin()
    first.write("results/x/a", b"a")
    sender.round()
    (chunk,) = first.lease.snapshot
    store.delete([place_of(chunk)])
    with pytest.raises(ValueError, match="No snapshot of .* can be read. Set another mirror"):
        second.begin()


def test_new_mirror_with_damaged_head_is_not_empty(first: Machine, second: Machine, store: Store) -> None:
    sender = first.begin()
    first.write("results/x/a", b"a")
    sender.round()
    damage_head(store, first.lease.newest()[0])
    with pytest.raises(ValueError, match="newest head of .* is damaged, and none before it names a snapshot"):
        second.begin()
    sender._lease.renew()  # the first machine still holds the mirror
    sender.release()
    second.begin()
    assert (second.root / "results/x/a").read_bytes() == b"a"


@pytest.mark.parametrize("lost", ["list", "head"])
def test_prune_removes_nothing_if_the_newest_file_list_is_unreadable(
    first: Machine, second: Machine, store: Store, lost: str
) -> None:
    sender = first.begin()
    for name in ("a", "b"):
        first.write(f"results/x/{name}", name.encode())
        sender.round()
    (chunk,) = first.lease.snapshot
    if lost == "list":
        store.put(place_of(chunk), b"damaged")
    else:
        damage_head(store, first.lease.newest()[0])
    config = MirrorConfig(url=store.url, every_s=0.01, silence_s=0.1)
    before = store.names("blobs"), store.names("heads")
    with pytest.raises(ValueError, match="Nothing is removed: .* Run snakemake with this mirror first"):
        prune(config, second.project)
    assert (store.names("blobs"), store.names("heads")) == before
    second.begin()
    assert (second.root / "results/x/a").read_bytes() == b"a"


def test_snapshot_is_consistent_during_writes(first: Machine) -> None:
    """The second file refers to the first, written before it; no snapshot has it without the first."""
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for name in ("results/a/payload", "results/b/described"):
                path = first.project.path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                (path.parent / ".new.tmp").write_bytes(b"x" * (number % 5000 + 1))
                (path.parent / ".new.tmp").rename(path)
            time.sleep(0.002)

    writing = threading.Thread(target=write)
    writing.start()
    try:
        seen = 0
        while seen < 200:
            sizes = {name: stamp[0] for name, stamp in take(first.project, {}).stamps.items()}
            if "results/b/described" in sizes and "results/a/payload" in sizes:
                payload, described = sizes["results/a/payload"], sizes["results/b/described"]
                assert (payload - described) % 5000 in (0, 1)
                seen += 1
    finally:
        over.set()
        writing.join()


def test_checkpoint_deleted_while_being_sent_is_complete(first: Machine, second: Machine) -> None:
    sender = first.begin()
    large = first.write("results/x/train/state/f/step-1/network.safetensors", bytes(3 << 20))
    put = sender._put

    def remove_first(data: bytes) -> str:
        large.unlink(missing_ok=True)
        return put(data)

    sender._put = remove_first  # type: ignore[method-assign]
    sender.round()
    assert not large.exists()
    second.begin()
    assert second.project.path("results/x/train/state/f/step-1/network.safetensors").read_bytes() == bytes(3 << 20)


def test_growing_journal_is_sent_up_to_its_size_in_the_snapshot(first: Machine, second: Machine) -> None:
    sender = first.begin()
    journal = first.write("results/x/journal/train/attempt-0001.jsonl", b"one\n")
    snapshot = take(first.project, {})
    with journal.open("ab") as file:
        file.write(b"two\n")
    assert sender._send(snapshot)["results/x/journal/train/attempt-0001.jsonl"].size == 4


def test_large_files_in_a_manifest_are_fetched_when_verified(
    first: Machine, second: Machine, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = first.begin()
    shard = np.random.default_rng(0).bytes(5000)
    sha256 = hashlib.sha256(shard).hexdigest()
    first.write("results/x/shard-0.tar", shard)
    first.write("results/x/large-alone", shard + b"x")
    first.write("results/y/large-of-another", shard + b"y")
    write_json(first.project.path("results/x/manifest.json"), {"shards": [{"file": "shard-0.tar", "sha256": sha256}]})
    sender.round()

    kept = second.begin()
    folder = second.root / "results/x"
    assert sorted(path.name for path in folder.iterdir()) == ["large-alone", "manifest.json"]
    assert not (second.root / "results/y/large-of-another").exists()
    kept.round()
    assert {"results/x/shard-0.tar", "results/y/large-of-another"} <= kept.files.keys()

    monkeypatch.setenv(mirrored.VARIABLE, str(second.project.state / "absent.json"))
    assert Damage("").fault_of(folder / "manifest.json") == "it is not complete"  # it has no index
    assert mirrored.is_mirrored(folder / "shard-0.tar", sha256)
    assert not mirrored.is_mirrored(folder / "shard-0.tar", sha256[::-1])
    assert damaged(folder, {"shard-0.tar": sha256}) == []
    assert (folder / "shard-0.tar").read_bytes() == shard
    kept.round()
    assert {"results/x/shard-0.tar", "results/y/large-of-another"} <= kept.files.keys()


def test_shards_and_checkpoints_are_fetched_when_read(
    first: Machine, second: Machine, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sender = first.begin(("x", "datasets/d"))
    crops = crops_of_twelve(tmp_path, num_shards=2)
    shutil.copytree(crops, first.root / "results/datasets/d/crops")
    images = open_shards(crops, "all").gather(np.arange(12))
    state = first.root / "results/x/train/state/run"
    checkpoint = Checkpoint(2, 8, False, {"network": {"weight": torch.arange(1000.0)}})
    path = write_checkpoint(state, checkpoint, {}, {}, lambda: None)
    sender.round()

    second.begin(("x", "datasets/d"))
    monkeypatch.setenv(mirrored.VARIABLE, str(second.project.state / "absent.json"))
    folder = second.root / "results/datasets/d/crops"
    assert not list(folder.glob("*.tar")) and not list(second.root.rglob("*.safetensors"))
    assert Damage("").fault_of(folder / "manifest.json") is None
    assert not list(folder.glob("*.tar"))
    assert torch.equal(open_shards(folder, "all").gather(np.arange(12)), images)
    other, _ = read_checkpoint(second.root / "results/x/train/state/run" / path.name)
    assert torch.equal(other.groups["network"]["weight"], torch.arange(1000.0))


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_shard_lost_by_the_mirror_is_rebuilt(
    first: Machine, second: Machine, small: None, store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    sender = first.begin()
    sha256 = hashlib.sha256(b"s" * 5000).hexdigest()
    first.write("results/x/shard-0.tar", b"s" * 5000)
    write_json(first.project.path("results/x/manifest.json"), {"shards": [{"file": "shard-0.tar", "sha256": sha256}]})
    sender.round()
    kept = second.begin()
    chunk = place_of(chunk_of(sha256, first.lease.token))
    if fault == "damaged":
        store.put(chunk, b"t" * 5000)
    else:
        store.delete([chunk])
    monkeypatch.setenv(mirrored.VARIABLE, str(second.project.state / "absent.json"))
    folder = second.root / "results/x"
    assert mirrored.is_mirrored(folder / "shard-0.tar", sha256)
    assert damaged(folder, {"shard-0.tar": sha256}) == ["shard-0.tar"]
    assert not mirrored.is_mirrored(folder / "shard-0.tar", sha256)
    kept.round()
    assert kept.files.keys() == {"results/x/manifest.json"}
    second.write("results/x/shard-0.tar", b"s" * 5000)
    kept.round()
    assert store.get(place_of(chunk_of(sha256, second.lease.token))) == b"s" * 5000


def test_rewritten_manifest_drops_its_old_shards(first: Machine, second: Machine, small: None) -> None:
    sender = first.begin()
    first.write("results/x/shard-0.tar", b"s" * 5000)
    sha256 = hashlib.sha256(b"s" * 5000).hexdigest()
    write_json(first.project.path("results/x/manifest.json"), {"shards": [{"file": "shard-0.tar", "sha256": sha256}]})
    sender.round()
    kept = second.begin()
    write_json(second.project.path("results/x/manifest.json"), {"shards": []})
    kept.round()
    assert kept.files.keys() == {"results/x/manifest.json"}


def test_damaged_chunk_is_reported_and_resent(first: Machine, second: Machine, store: Store, tmp_path: Path) -> None:
    sender = first.begin()
    first.write("results/x/metrics.json", b"[1, 2]")
    sender.round()
    chunk = chunk_of(hashlib.sha256(b"[1, 2]").hexdigest(), first.lease.token)
    store.put(place_of(chunk), b"[1, 3]")
    kept = second.begin()
    assert "results/x/metrics.json cannot be fetched, and is made again" in second.said[-1]
    second.write("results/x/metrics.json", b"[1, 2]")
    kept.round()
    third = Machine(tmp_path / "third", store)
    third.begin()
    assert (third.root / "results/x/metrics.json").read_bytes() == b"[1, 2]"


@pytest.mark.parametrize("name", ["results/../x", "other/x", "results//etc/x", "results", "results/a\0b"])
def test_paths_outside_the_project_are_rejected(first: Machine, name: str) -> None:
    with pytest.raises(ValueError, match="is no file of a project"):
        first.project.path(name)


@pytest.mark.parametrize(
    "plain", [[], [1, 2, "x", []], [1, 2, "0" * 64, ["../x"]], [1, 2, "0" * 64, ["0" * 64]], "abc", None]
)
def test_damaged_entries_are_rejected(plain: object) -> None:
    with pytest.raises(ValueError, match="is damaged"):
        MirroredFile.parse(plain)


def test_last_holder_of_the_mirror_continues_with_its_own_files(first: Machine, second: Machine, store: Store) -> None:
    first.write("results/x/sent", b"sent")
    first.begin().round()
    first.write("results/x/model.json", b"made since")
    first.write(RECORD, b"{}")
    again = Machine(first.root, store)
    again.begin().round()
    assert again.said == []
    again.lease.renew(is_released=True)
    second.begin()
    assert second.content() == first.content()
    assert DiskState.read(again.project, "s3://another").token == ""


def test_last_holder_of_the_mirror_keeps_its_files_despite_a_damaged_head(first: Machine, store: Store) -> None:
    sender = first.begin()
    for name in ("a", "b"):
        first.write(f"results/x/{name}", name.encode())
        sender.round()
    first.write("results/x/model.json", b"made since")
    first.write(RECORD, b"{}")
    before = first.content()
    damage_head(store, first.lease.newest()[0])
    Machine(first.root, store).begin()
    assert first.content() == before


def test_disk_with_newest_snapshot_is_ahead_even_if_another_process_took_the_lease(
    first: Machine, second: Machine, store: Store
) -> None:
    """The other process was killed before it recorded that it holds the mirror, or pruned the mirror."""
    first.write("results/x/sent", b"sent")
    first.begin().round()
    first.lease.renew(is_released=True)
    other = Lease(store, 0.1)
    other.take("", first.said.append)
    other.renew(is_released=True)
    first.write("results/x/model.json", b"made since")
    first.write(RECORD, b"{}")
    again = Machine(first.root, store)
    again.begin().round()
    again.lease.renew(is_released=True)
    second.begin()
    assert second.content() == first.content()


def test_outdated_disk_receives_new_files_and_loses_deleted_ones(first: Machine, second: Machine, store: Store) -> None:
    sender = first.begin()
    first.write("results/x/old", b"old")
    first.write("results/x/same", b"same")
    sender.round()
    first.lease.renew(is_released=True)
    other = second.begin()
    second.project.path("results/x/old").unlink()
    second.write("results/x/new", b"new")
    other.round()
    second.lease.renew(is_released=True)
    Machine(first.root, store).begin()
    assert first.content() == second.content()


def test_results_missing_from_the_mirror_are_not_overwritten(first: Machine, second: Machine, store: Store) -> None:
    sender = first.begin()
    first.write("results/x/metrics.json", b"[1]")
    sender.round()
    first.lease.renew(is_released=True)
    second.write("results/x/model.json", b"{}")
    second.write(RECORD, b"{}")
    with pytest.raises(ConflictError, match="1 results of this folder, results/x/model.json for instance, are not in"):
        second.begin()


def test_existing_results_start_a_new_mirror(first: Machine, second: Machine) -> None:
    first.write("results/x/model.json", b"{}")
    first.write(RECORD, b"{}")
    first.begin().round()
    second.begin()
    assert second.content() == first.content()


def test_only_one_machine_at_a_time_uses_the_mirror(first: Machine, second: Machine) -> None:
    first.begin()
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.01):
            first.lease.renew()

    living = threading.Thread(target=live)
    living.start()
    try:
        with pytest.raises(TakenError, match=r"process \d+ on .* works with file://"):
            second.begin()
    finally:
        over.set()
        living.join()
    second.begin()  # the first machine has been silent
    assert "has not left file://" in second.said[-1]
    with pytest.raises(TakenError, match="works with"):
        first.lease.renew()


def test_mirror_released_while_waiting_is_taken(first: Machine, store: Store, tmp_path: Path) -> None:
    first.begin()
    patient = Machine(tmp_path / "second", store, silence_s=10.0)
    leaving = threading.Timer(0.3, lambda: first.lease.renew(is_released=True))
    leaving.start()
    patient.begin()
    leaving.join()


def test_released_mirror_is_taken_at_once(first: Machine, store: Store, tmp_path: Path) -> None:
    first.begin()
    first.lease.renew(is_released=True)
    patient = Machine(tmp_path / "second", store, silence_s=1e6)
    patient.begin()
    assert patient.said == []


def test_old_heads_are_removed_without_a_gap(first: Machine, store: Store) -> None:
    first.begin()
    for _ in range(40):
        first.lease.renew()
    names = sorted(map(int, store.names("heads")))
    assert names == [*range(22, 42)]


@pytest.mark.parametrize("stale", [set(), {1}, {1, 2}, set(range(1, 30))])
def test_newest_head_is_found_despite_a_stale_listing(
    first: Machine, store: Store, monkeypatch: pytest.MonkeyPatch, stale: set[int]
) -> None:
    first.begin()
    for _ in range(40):
        first.lease.renew()
    names = store.names
    answers = iter([{f"{number:010}": 1 for number in stale}, names("heads")])
    monkeypatch.setattr(store, "names", lambda folder: next(answers) if folder == "heads" else names(folder))
    number, head = Lease(store, 1.0).newest()
    assert number == 41 and head.token == first.lease.token


def test_head_that_could_not_be_removed_is_removed_later(
    first: Machine, second: Machine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.begin()
    for _ in range(25):
        first.lease.renew()
    delete = store.delete

    def failing(names: Iterable[str]) -> None:
        raise ValueError("the connection is gone")

    monkeypatch.setattr(store, "delete", failing)
    first.lease.renew()
    first.lease.renew()
    monkeypatch.setattr(store, "delete", delete)
    second.begin()
    second.lease.renew()
    numbers = sorted(map(int, store.names("heads")))
    assert numbers == [*range(numbers[0], numbers[0] + 20)]


def test_lost_create_response_is_not_a_conflict(first: Machine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first.begin()
    create = store._create

    def twice(name: str, data: bytes) -> None:
        create(name, data)
        create(name, data)

    monkeypatch.setattr(store, "_create", twice)
    first.lease.renew()
    monkeypatch.undo()
    first.lease.renew()


def test_renewal_without_a_response_is_detected_by_the_next_one(
    first: Machine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.begin()
    create = store.create

    def losing(name: str, data: bytes) -> bool:
        create(name, data)
        raise ValueError("the connection is gone")

    monkeypatch.setattr(store, "create", losing)
    with pytest.raises(ValueError, match="gone"):
        first.lease.renew(("a",))
    monkeypatch.undo()
    first.lease.renew(("b",))
    assert Lease(store, 1.0).newest()[1].snapshot == ("b",)


def test_conflict_without_an_object_is_retried(first: Machine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first.begin()
    refusals = iter([True, True])
    create = store._create

    def refusing(name: str, data: bytes) -> None:
        if next(refusals, False):
            raise FileExistsError(name)
        create(name, data)

    monkeypatch.setattr(store, "_create", refusing)
    first.lease.renew()


def test_store_without_conditions_is_rejected(first: Machine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first.lease.check_conditions()
    monkeypatch.setattr(store, "_create", store.put)
    with pytest.raises(ValueError, match="does not create objects on the condition"):
        first.lease.check_conditions()


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"snapshot": 1}'])
def test_damaged_heads_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="head of the mirror is damaged"):
        Head.parse(data)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bucket", "no URL"),
        ("s3://user:password@bucket/x", "password"),
        ({"url": "file:///x", "every_s": 30, "silence_s": 60}, "three times"),
        ({"url": "file:///x", "every": 30}, "every is not a known key. Did you mean every_s?"),
        ({"url": "file:///x", "every_s": 0}, "every_s is 0: input should be greater than 0"),
        ({"every_s": 30}, "url"),
        (5, "mirror: "),
    ],
)
def test_invalid_mirror_settings_are_rejected(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MirrorConfig.parse(setting)


def test_mirror_setting_is_a_url_or_a_section() -> None:
    assert MirrorConfig.parse(None) is None and MirrorConfig.parse("") is None
    assert MirrorConfig.parse("s3://b/p") == MirrorConfig(url="s3://b/p", every_s=30.0, silence_s=120.0)
    assert MirrorConfig.parse({"url": "s3://b/p", "every_s": 5}) == MirrorConfig(
        url="s3://b/p", every_s=5, silence_s=120.0
    )


def test_atomically_renamed_folders_are_sent_complete(first: Machine, second: Machine) -> None:
    sender = first.begin()
    with atomic_folder(first.root / "results/x/export") as folder:
        (folder / "a").write_bytes(b"a")
        sender.round()
    assert not sender.files
    sender.round()
    second.begin()
    assert (second.root / "results/x/export/a").read_bytes() == b"a"
