"""Atomic file writes, and digests that depend on content only."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from image_diffusion.core.files.atomic import (
    atomic_folder,
    atomic_write,
    digest,
    parse_json,
    read_checksums,
    read_json,
    write_if_changed,
    write_json,
)
from image_diffusion.core.files.weights import read_weights, save_weights


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list((tmp_path / "a").iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"good": 1})
    with pytest.raises(ValueError):
        write_json(path, {"bad": float("nan")})
    assert read_json(path) == {"good": 1}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the umask is read from there")
def test_umask_is_not_changed_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another thread could create files that everybody may write."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            write_json(tmp_path / "file.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.json").stat().st_mode) == 0o640


def test_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a [1].npz"
    half = (
        "from image_diffusion.core.files.atomic import *; import os, sys\n"
        "with atomic_write(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", half, str(path)], check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    (tmp_path / ".b.npz.x.tmp").touch()
    with atomic_write(path) as first, atomic_write(path) as second:
        assert not left.exists()
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".b.npz.x.tmp", "a [1].npz"]


def test_folders_are_replaced_atomically(tmp_path: Path) -> None:
    folder, left = tmp_path / "folder", tmp_path / ".folder.x.tmp"
    for text in ("one", "two"):
        left.mkdir()
        (left / "large").touch()
        with atomic_folder(folder) as written:
            assert not left.exists()
            (written / text).touch()
        assert [path.name for path in folder.iterdir()] == [text]
    with pytest.raises(ValueError, match="half way"), atomic_folder(folder) as written:
        raise ValueError("half way")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "two"]


def test_unchanged_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_if_changed(path, "text")
    os.utime(path, ns=(1, 1))
    write_if_changed(path, "text")
    assert path.stat().st_mtime_ns == 1
    write_if_changed(path, "other")
    assert path.stat().st_mtime_ns != 1


def test_writing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    write_json(tmp_path / "file.json", {"a": 1})
    assert len(list(opened.iterdir())) == before


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2, "ü"]}) == digest({"b": [2, "ü"], "a": 1}) != digest({"a": 1, "b": [2, "u"]})


def test_any_flipped_bit_in_sealed_json_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_json(path, {"code": digest("some code"), "steps": 8})
    written = path.read_bytes()
    assert read_json(path) == {"code": digest("some code"), "steps": 8}
    for bit in range(8 * len(written)):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="is damaged"):
            parse_json(bytes(flipped), "note.json", "")


@pytest.mark.parametrize("text", [f'{{"a": NaN, "sha256": "{"0" * 64}"}}', "{}", "[]", f'{{"sha256": "{"0" * 64}"}}'])
def test_json_without_a_seal_is_read(text: str) -> None:
    assert str(parse_json(text.encode(), "foreign.json", "")) == str(json.loads(text))


def test_weights_round_trip_and_changed_bytes_are_detected(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 2), "a": torch.arange(4)}
    save_weights(tmp_path, tensors, {"step": 7})
    loaded, model = read_weights(tmp_path)
    assert model["step"] == 7 and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    path = tmp_path / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not match the sha256 in .* Run the train stage again"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["a\u2028b.png", "a\u2029b.png", "a\x85b.png", "a\x0bb  c.png"])
def test_checksums_of_names_with_line_separators_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n{'1' * 64}  last\n")
    assert read_checksums(tmp_path) == {name: "0" * 64, "last": "1" * 64}
