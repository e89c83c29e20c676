"""Reading shards: every sample, from any position, and no damaged data or data of another codec."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from image_diffusion.core.files import checksums
from image_diffusion.core.files.atomic import read_json, sha256_file, write_json
from image_diffusion.core.random.streams import Streams
from image_diffusion.data.shards.loader import Batches, Examples, _Staging
from image_diffusion.data.shards.order import Balanced, epoch_order
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.records import (
    Sample,
    ShardRecord,
    describe_shards,
    histogram,
    index_of,
    read_index,
    read_record,
    write_index,
    write_record,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout

Make = Callable[..., tuple[Path, np.ndarray, np.ndarray]]


def spread(number: int, total: int) -> str:
    """Return a content hash at number / total of the range of hashes."""
    return f"{number * 2**64 // total:016x}{0:048x}"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a set of latents with the given number of samples in each shard; returns folder, images, mirror images."""

    def write(counts: list[int], name: str = "set", **manifest: Any) -> tuple[Path, np.ndarray, np.ndarray]:
        folder = tmp_path / name
        layout = Layout(("npy", "flip.npy"), (2, 1, 2, 2), "float16", labelled=True)
        total = sum(counts)
        plain = np.arange(total * 8).reshape(total, 2, 1, 2, 2).astype(np.float16)
        labels = np.arange(total) % 3
        records, first = [], 0
        for shard, count in enumerate(counts):
            rows = slice(first, first + count)
            sha256, size, _ = write_shard(
                folder, shard, layout, [({"npy": plain[rows], "flip.npy": -plain[rows]}, labels[rows])]
            )
            samples = [
                Sample(f"{shard:05d}-{i - first:06d}", f"{i}.png", spread(i, total), int(labels[i]), (9, 9), [])
                for i in range(first, first + count)
            ]
            records.append(
                ShardRecord(shard, "x", sha256, size, count, histogram(labels[rows].tolist()), samples, {}, [])
            )
            write_record(folder, records[-1])
            first += count
        write_index(folder / "index.npy", map(index_of, records))
        described = {
            "format": 1,
            "kind": "latents",
            "name": name,
            "codec": {"name": "toy", "sha256": "1"},
            "classes": ["a", "b", "c"],
            "validation_fraction": 0.0,
            **describe_shards(layout, records),
            "index": sha256_file(folder / "index.npy"),
        }
        write_json(folder / "manifest.json", described | manifest)
        return folder, plain, labels

    return write


def test_gather_returns_any_samples_in_any_order_flipped_on_request(make: Make) -> None:
    folder, plain, labels = make([4, 0, 7, 1])
    for dataset in (open_shards(folder), open_shards(folder, in_background=True).hold()):
        assert (dataset.num_samples, dataset.shape, dataset.dtype) == (12, (2, 1, 2, 2), torch.float16)
        assert (dataset.labels == labels).all() and dataset.labels.dtype == np.int64
        assert dataset.classes == ["a", "b", "c"] and dataset.num_classes == 3
        indices = np.array([11, 0, 3, 3, 4, 10, 7])
        assert (dataset.gather(indices).numpy() == plain[indices]).all()
        flip = np.array([True, False, True, False, False, True, True])
        expected = np.where(flip[:, None, None, None, None], -plain[indices], plain[indices])
        assert (dataset.gather(indices, flip).numpy() == expected).all()
        out = torch.full((9, 2, 1, 2, 2), -1.0, dtype=torch.float16)
        found = dataset.gather(indices, flip, out=out)
        assert found.data_ptr() == out.data_ptr() and (found.numpy() == expected).all() and (out[7:] == -1).all()
        assert dataset.gather(np.array([], dtype=np.int64)).shape == (0, 2, 1, 2, 2)


def test_split_depends_on_the_content_hash(make: Make) -> None:
    folder, plain, _ = make([5, 5], validation_fraction=0.3)
    validation, train, both = (open_shards(folder, split) for split in ("validation", "train", "all"))  # type: ignore[arg-type]
    assert (validation.num_samples, train.num_samples, both.num_samples) == (3, 7, 10)
    assert (validation.gather(np.arange(3)).numpy() == plain[:3]).all()
    assert (train.gather(np.arange(7)).numpy() == plain[3:]).all()
    assert (train.labels == np.arange(3, 10) % 3).all()


def test_resaved_files_change_the_selection_if_other_samples_are_held_out(make: Make) -> None:
    folder, _, _ = make([5, 5], validation_fraction=0.3)
    before = open_shards(folder)

    def save_again(content: np.ndarray) -> Shards:
        index = read_index(folder / "index.npy")
        index["content"] = content
        write_index(folder / "index.npy", [index])
        manifest = read_json(folder / "manifest.json")
        write_json(folder / "manifest.json", manifest | {"index": sha256_file(folder / "index.npy")})
        return open_shards(folder)

    content = read_index(folder / "index.npy")["content"]
    same = save_again(content + np.uint64(1))
    assert (same.digest, same.selection) == (before.digest, before.selection)
    other = save_again(content[::-1].copy())
    assert other.digest == before.digest and other.selection != before.selection


@pytest.fixture
def sets() -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    """Sets written so far, by their sample counts."""
    return {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.sampled_from([[1], [5], [0, 3, 4], [6, 0, 1, 2], [2, 2, 2, 2, 2]]),
    world=st.integers(1, 5),
    batch=st.integers(1, 12),
    start=st.integers(0, 40),
    prefetch=st.integers(1, 4),
    hold=st.booleans(),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_ranks_jointly_read_the_stream_from_any_start(
    make: Make,
    sets: dict[str, tuple[Path, np.ndarray, np.ndarray]],
    counts: list[int],
    world: int,
    batch: int,
    start: int,
    prefetch: int,
    hold: bool,
    flip: float,
) -> None:
    if str(counts) not in sets:
        sets[str(counts)] = make(counts, f"set{len(sets)}")
    folder, plain, labels = sets[str(counts)]
    total, steps, seed = sum(counts), 3, 7
    dataset = open_shards(folder)
    if hold:
        dataset = dataset.hold()
    streams = [iter(Batches(dataset, batch, seed, rank, world, start, flip, prefetch)) for rank in range(world)]
    for step in range(steps):
        shares = [next(stream) for stream in streams]
        positions = np.arange(start + step * batch, start + (step + 1) * batch)
        sample = torch.cat([each.sample for each in shares])
        epoch = torch.cat([each.epoch for each in shares])
        assert (epoch.numpy() == positions // total).all()
        assert sample.tolist() == [int(epoch_order(total, seed, p // total)[p % total]) for p in positions]
        flipped = Streams(seed, epoch, sample).event("flip", flip)
        sign = torch.where(flipped, -1.0, 1.0).view(-1, 1, 1, 1, 1)
        assert (torch.cat([each.stored for each in shares]) == torch.from_numpy(plain)[sample] * sign).all()
        assert (torch.cat([each.label for each in shares]).numpy() == labels[sample]).all()


def test_all_ranks_end_together_after_the_requested_epochs(make: Make) -> None:
    folder, _, _ = make([5, 6])
    dataset = open_shards(folder)
    ranks = [list(Batches(dataset, 4, 0, rank, 3, epochs=2)) for rank in range(3)]
    assert {len(batches) for batches in ranks} == {6}
    assert sum(len(batches[-1].sample) for batches in ranks) == 2
    seen = [sample for batches in ranks for each in batches for sample in each.sample.tolist()]
    assert sorted(seen) == sorted([*range(11), *range(11)])


@pytest.mark.parametrize("start", [0, 21])
def test_classes_are_balanced_over_all_ranks(make: Make, start: int) -> None:
    folder, _, labels = make([7, 4])
    dataset = open_shards(folder)
    for world in (1, 3):
        ranks = [iter(Batches(dataset, 5, 0, rank, world, start, balance_classes=True)) for rank in range(world)]
        steps = [[next(rank) for rank in ranks] for _ in range(6)]
        sample = torch.cat([each.sample for step in steps for each in step])
        assert np.bincount(labels[sample]).tolist() == [10, 10, 10]
        assert (
            np.stack([sample, torch.cat([each.epoch for step in steps for each in step])])
            == np.stack(Balanced(labels, 0).at(start, start + 30))
        ).all()


def test_examples_split_into_microbatches() -> None:
    numbers = torch.arange(7)
    examples = Examples(numbers * 10, numbers, numbers + 1, numbers + 2)
    parts = examples.split(3)
    assert [len(part.label) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.stored for part in parts]), examples.stored)
    assert parts[2].sample.tolist() == [8]


def test_reader_thread_ends_with_the_iterator_and_raises_its_errors(make: Make) -> None:

    folder, _, _ = make([5])
    dataset = open_shards(folder)
    stream = iter(Batches(dataset, 2, 0))
    next(stream)
    assert any(thread.name == "batches" for thread in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "batches" for thread in threading.enumerate())
    dataset.labels = dataset.labels[:1]
    with pytest.raises(IndexError):
        list(Batches(dataset, 5, 0, epochs=1))


def test_an_empty_split_or_batch_is_refused(make: Make) -> None:
    folder, _, _ = make([5])
    with pytest.raises(ValueError, match=r"The split holds no samples\. Add images"):
        Batches(open_shards(folder, "validation"), 2, 0)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        Batches(open_shards(folder), 0, 0)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "does not exist. Run the stage"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 100), "is damaged"),
    "another format": (
        lambda folder: write_json(
            folder / "manifest.json", json.loads((folder / "manifest.json").read_text()) | {"format": 2}
        ),
        "is not of format 1",
    ),
    "a missing shard": (lambda folder: (folder / "shard-00001.tar").unlink(), "shard-00001.tar is missing"),
    "a short shard": (
        lambda folder: os.truncate(folder / "shard-00001.tar", 512),
        r"shard-00001.tar has 512 bytes, not 20,480",
    ),
    "no index": (lambda folder: (folder / "index.npy").unlink(), "index.npy does not exist"),
    "half an index": (lambda folder: os.truncate(folder / "index.npy", 150), "index.npy is damaged"),
    "an index of something else": (
        lambda folder: np.save(folder / "index.npy", np.arange(3)),
        "index.npy is damaged: it holds int64",
    ),
    "an index of another set": (
        lambda folder: np.save(folder / "index.npy", np.load(folder / "index.npy")[:3]),
        "index.npy is damaged: its sha256",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_sets_are_rejected_in_one_line(make: Make, damage: str) -> None:
    folder, _, _ = make([4, 5])
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        open_shards(folder)
    assert "\n" not in str(error.value)


def flip(path: Path, byte: int) -> None:
    """Flip one bit of a file in place and restore its mtime, so that only its ctime differs."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("known", [False, True], ids=["never read", "found good before"])
def test_flipped_bit_is_detected_before_reading(make: Make, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_S", -1.0)
    folder, plain, _ = make([4, 5])
    if known:
        assert (open_shards(folder).hold().gather(np.arange(9)).numpy() == plain).all()
    flip(folder / "shard-00000.tar", 1700)
    dataset = open_shards(folder)
    assert (dataset.gather(np.arange(4, 9)).numpy() == plain[4:]).all()
    message = r"shard-00000\.tar is damaged: .* Run the stage that writes it again\."
    with pytest.raises(ValueError, match=message):
        dataset.gather(np.arange(3, 9))
    with pytest.raises(ValueError, match=message):
        open_shards(folder, in_background=True)
    folder, _, _ = make([4, 5], "other")
    open_shards(folder)
    flip(folder / "index.npy", 128)
    with pytest.raises(ValueError, match=r"index\.npy is damaged: its sha256"):
        open_shards(folder)


def test_file_is_hashed_once_per_modification_stamp(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(checksums, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    folder, _, _ = make([4, 5])
    for settled in (3600.0, -1.0, -1.0):  # at first the file is too recent for its stamp to be trusted
        monkeypatch.setattr(checksums, "_SETTLED_S", settled)
        open_shards(folder).hold()
        open_shards(folder, in_background=True)
    assert sorted(Counter(hashed).items()) == [("index.npy", 3), ("shard-00000.tar", 3), ("shard-00001.tar", 3)]
    os.utime(folder / "shard-00001.tar")
    open_shards(folder).hold()
    assert hashed[9:] == ["shard-00001.tar"]


def test_large_sets_are_hashed_in_the_background(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain, _ = make([4, 5])
    flip(folder / "shard-00001.tar", 1700)
    may_hash = threading.Event()

    def slowly(path: Path) -> str:
        assert path.suffix == ".npy" or may_hash.wait(30)
        return sha256_file(path)

    monkeypatch.setattr(checksums, "AT_ONCE_BYTES", 10_000)
    monkeypatch.setattr(checksums, "sha256_file", slowly)
    dataset = open_shards(folder, in_background=True)
    assert (dataset.gather(np.arange(4)).numpy() == plain[:4]).all()
    may_hash.set()
    for read in (dataset.verified, lambda: dataset.gather(np.arange(1))):
        with pytest.raises(ValueError, match=r"shard-00001\.tar is damaged"):
            read()


FALSE: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no shards": (lambda m: {key: m[key] for key in m if key != "shards"}, "shards is required"),
    "an unknown key": (lambda m: m | {"stirde": 1}, "stirde is not a known key. Did you mean stride?"),
    "a stride of nothing": (lambda m: m | {"stride": 0}, "stride is 0, but shape, classes and numbers of"),
    "other offsets": (lambda m: m | {"offsets": {"npy": 0, "flip.npy": 512}}, "offsets is {'npy': 0"),
    "objects": (lambda m: m | {"dtype": "object"}, "Unknown dtype 'object'"),
    "a huge shape": (lambda m: m | {"shape": [2**40, 1, 1, 1]}, "shape.0 is 1099511627776"),
    "a number as text": (lambda m: m | {"stride": str(m["stride"])}, "stride is '3072'"),
    "a shard elsewhere": (lambda m: m | {"shards": [m["shards"][0] | {"file": "../x.tar"}]}, "file is '../x.tar'"),
    "no sha256": (lambda m: m | {"index": "../../x"}, r"index is '../../x'"),
    "fewer samples": (lambda m: m | {"num_samples": 3}, "num_samples is 3, but"),
    "too many held out": (lambda m: m | {"validation_fraction": 0.6, "test_fraction": 0.4}, "leave nothing to train"),
    "many mistakes": (lambda m: m | {"shards": [{}] * 50}, r"shards.0.file is required. \(and 199 more\) Run"),
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE)
def test_manifest_is_validated_like_a_configuration(make: Make, what: str) -> None:
    folder, _, _ = make([4, 5])
    change, message = FALSE[what]
    write_json(folder / "manifest.json", change(read_json(folder / "manifest.json")))
    with pytest.raises(ValueError, match=f"manifest.json: .*{message}") as error:
        open_shards(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Run the stage that writes it again, or get the set anew.")


def test_changed_or_deeply_nested_manifest_is_damaged(make: Make) -> None:
    folder, _, _ = make([4, 5])
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"validation_fraction": 0.0', '"validation_fraction": 0.1'))
    with pytest.raises(ValueError, match="manifest.json is damaged: "):
        open_shards(folder)
    path.write_text('{"format": ' + "[" * 200_000)
    with pytest.raises(ValueError, match="manifest.json is damaged: maximum recursion depth exceeded"):
        open_shards(folder)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"shape": [2, 2, 1, 2]}])
def test_shards_that_contradict_the_dtype_or_shape_of_the_manifest_are_rejected(
    make: Make, change: dict[str, Any]
) -> None:
    folder, _, _ = make([0, 5])
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | change)
    with pytest.raises(ValueError, match=r"shard-00001\.tar does not hold .*, as the manifest says\. Run the stage"):
        open_shards(folder).hold()


def test_a_class_that_does_not_exist_is_refused(make: Make) -> None:
    folder, _, _ = make([4, 5])
    index = np.load(folder / "index.npy")
    index["label"][3] = 3
    np.save(folder / "index.npy", index)
    changed = {"index": sha256_file(folder / "index.npy")}
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | changed)
    with pytest.raises(ValueError, match=r"index\.npy gives class 3 of 3 to a sample"):
        open_shards(folder)


def test_digest_depends_on_samples_and_split_alone(make: Make) -> None:
    first = open_shards(make([4, 5], "one")[0]).digest
    assert open_shards(make([4, 5], "two", quarantined=3)[0]).digest == first
    assert open_shards(make([5, 4], "three")[0]).digest != first
    assert open_shards(make([4, 5], "four", validation_fraction=0.1)[0]).digest != first


def test_crops_are_mirrored_when_they_are_read(tmp_path: Path, make: Make) -> None:
    folder, _, _ = make([6])
    dataset = open_shards(folder)
    without = {**dataset.manifest, "offsets": {"npy": dataset.manifest["offsets"]["npy"]}}
    crops = Shards(folder, without, "all")
    flip = np.array([True, False, False, True, True, False])
    for each in (crops, Shards(folder, without, "all").hold()):
        found, plain = each.gather(np.arange(6), flip), each.gather(np.arange(6))
        assert torch.equal(found[torch.from_numpy(flip)], plain[torch.from_numpy(flip)].flip(-1))
        assert torch.equal(found[torch.from_numpy(~flip)], plain[torch.from_numpy(~flip)])


def test_open_shards_hold_no_file_descriptors(make: Make) -> None:
    folder, plain, _ = make([1] * 60)
    before = len(list(Path("/proc/self/fd").iterdir()))
    dataset = open_shards(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    assert (dataset.gather(np.arange(60)).numpy() == plain).all()


def test_records_survive_a_round_trip(make: Make) -> None:

    folder, _, _ = make([4])
    record = read_record(folder, 0)
    assert replace(record) == record and record.samples[3].key == "00000-000003"


def test_examples_are_copied_on_the_device_of_the_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts on the first GPU, and leaving a stream of another GPU returns there, which takes its memory."""
    of_process, empty = torch.device("meta"), torch.empty
    current: list[torch.device | None] = [None]

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        assert current[-1] == of_process
        yield
        assert current[-1] == of_process

    def unpinned(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    fakes = {"device": device, "stream": stream, "Stream": lambda device: None, "Event": lambda: event}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", unpinned)
    moved, _ = _Staging(of_process, 2).put(open_shards(make([4])[0]), np.arange(4), None, (torch.arange(4),))
    assert [tensor.device for tensor in moved] == [of_process] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_are_copied_to_the_gpu_through_reused_buffers(make: Make) -> None:
    dataset = open_shards(make([40, 33])[0])
    here = iter(Batches(dataset, 8, 0, flip_probability=0.5))
    there = iter(Batches(dataset, 8, 0, flip_probability=0.5, device=torch.device("cuda")))
    kept = []
    for _ in range(30):
        expected, found = next(here), next(there)
        kept.append((expected, found))
        torch.cuda._sleep(1_000_000)  # the GPU falls behind: buffers are reused while copies are still queued
    for expected, found in kept:
        assert found.stored.is_cuda and torch.equal(found.stored.cpu(), expected.stored)
        assert torch.equal(found.label.cpu(), expected.label) and torch.equal(found.sample.cpu(), expected.sample)
