"""Shards: byte-identical to those of webdataset and readable by standard tar tools."""

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from image_diffusion.data.shards.records import write_shard
from image_diffusion.data.shards.tar_layout import Layout


def _chunks(arrays: dict[str, np.ndarray], labels: np.ndarray, size: int) -> Iterator[Any]:
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        yield {name: array[part] for name, array in arrays.items()}, labels[part]


def _by_webdataset(path: Path, shard: int, arrays: dict[str, np.ndarray], labels: np.ndarray, labelled: bool) -> bytes:
    with webdataset.TarWriter(str(path), mtime=0) as writer:
        for i, label in enumerate(labels):
            sample: dict[str, Any] = {"__key__": f"{shard:05d}-{i:06d}"}
            sample |= {name: array[i] for name, array in arrays.items()}
            writer.write(sample | ({"cls": int(label)} if labelled else {}))
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 30),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float16", "float32"]),
    members=st.sampled_from([("npy",), ("npy", "flip.npy")]),
    labelled=st.booleans(),
    most=st.sampled_from([1, 9, 10, 1000, 2**31 - 1]),
    shard=st.sampled_from([0, 7, 12345]),
    chunk=st.integers(1, 30),
)
def test_shards_are_byte_identical_to_webdataset(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    shape: list[int],
    dtype: str,
    members: tuple[str, ...],
    labelled: bool,
    most: int,
    shard: int,
    chunk: int,
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    generator = np.random.default_rng(count)
    arrays = {name: generator.integers(0, 200, (count, *shape)).astype(dtype) for name in members}
    labels = generator.integers(0, most, count)
    layout = Layout(members, tuple(shape), dtype, labelled)
    sha256, size, written = write_shard(folder, shard, layout, _chunks(arrays, labels, chunk))
    ours = (folder / f"shard-{shard:05d}.tar").read_bytes()
    assert ours == _by_webdataset(folder / "theirs.tar", shard, arrays, labels, labelled)
    assert (hashlib.sha256(ours).hexdigest(), len(ours), count) == (sha256, size, written)
    assert len(ours) == layout.file_bytes(count)


def test_shard_bytes_do_not_change_between_versions(tmp_path: Path) -> None:
    """Another version of webdataset must not change them, or the hashes of all existing shards would change."""
    x = np.arange(24).reshape(4, 2, 3)
    layout = Layout(("npy", "flip.npy"), (2, 3), "float16", labelled=True)
    chunks = [({"npy": x, "flip.npy": -x}, np.array([7, 0, 123, 2**31 - 1]))]
    sha256, _, _ = write_shard(tmp_path, 3, layout, chunks)
    assert sha256 == "56e993ffe74f02a553adf73e64badad36319fc42646e40593468425b6dde1823"


def test_more_samples_than_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.data.shards.records.MAX_SAMPLES", 3)
    layout = Layout(("npy",), (1,), "uint8", labelled=False)
    with pytest.raises(ValueError, match=r"more than 3 samples\. Raise data\.num_shards"):
        write_shard(tmp_path, 0, layout, [({"npy": np.zeros((4, 1))}, np.zeros(4, dtype=np.int64))])
    assert list(tmp_path.iterdir()) == []


def test_offsets_point_at_the_array_data(tmp_path: Path) -> None:
    layout = Layout(("npy", "flip.npy"), (2, 3), "float16", labelled=True)
    arrays = {"npy": np.arange(24).reshape(4, 2, 3), "flip.npy": -np.arange(24).reshape(4, 2, 3)}
    write_shard(tmp_path, 3, layout, [(arrays, np.arange(4))])
    data = (tmp_path / "shard-00003.tar").read_bytes()
    for name, offset in layout.offsets().items():
        for i in range(4):
            found = np.frombuffer(data, np.float16, 6, i * layout.stride + offset).reshape(2, 3)
            assert (found == arrays[name][i]).all()
    with tarfile.open(tmp_path / "shard-00003.tar") as tar:
        assert tar.getnames()[:3] == ["00003-000000.cls", "00003-000000.flip.npy", "00003-000000.npy"]
