"""Change detection of source files: touching them re-runs nothing; changing them always does."""

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from image_diffusion.core.files.atomic import read_json, sha256_file
from image_diffusion.data.sources.base import LARGEST_TEXT, FileGroup, add_stamp, plain_text
from image_diffusion.data.sources.changes import _Folder, record_source, refresh
from image_diffusion.data.sources.folder import Folder


@pytest.fixture
def source(tmp_path: Path) -> Folder:
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    return Folder(path=str(tmp_path / "in"))


def cropped(source: Folder, path: Path) -> None:
    """Record the source as crop does after reading every file."""
    files = list(source.file_groups())
    hashes = {
        found.folder + plain_text(name): sha256_file(Path(found.at(name))) for found in files for name in found.names
    }
    record_source(source, path, files, hashes)


def later(path: Path) -> None:
    """Set a modification time later than that of any earlier write."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000_000))


def same_times(*paths: Path) -> None:
    """Give files one modification time, as `tar` and `rsync --times` restore normalised ones."""
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))


def change_places(folder: Path) -> None:
    """Swap two images of equal size and time."""
    (folder / "a/1.png").rename(folder / "one")
    (folder / "a/2.png").rename(folder / "a/1.png")
    (folder / "one").rename(folder / "a/2.png")


def edit_in_place(folder: Path) -> None:
    """Edit an image and restore its modification time."""
    before = (folder / "a/1.png").stat()
    (folder / "a/1.png").write_bytes(b"A/1.png")
    os.utime(folder / "a/1.png", ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited, same size": lambda folder: ((folder / "a/1.png").write_bytes(b"A/1.png"), later(folder / "a/1.png")),
    "edited, other size": lambda folder: (folder / "a/1.png").write_bytes(b"longer than before"),
    "edited in place, same size and time": edit_in_place,
    "swapped, same size and time": change_places,
    "added": lambda folder: (folder / "a/4.png").write_bytes(b"4"),
    "deleted": lambda folder: (folder / "b/3.png").unlink(),
    "renamed": lambda folder: (folder / "b/3.png").rename(folder / "b/5.png"),
}
NO_CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "touched": lambda folder: [later(path) for path in folder.rglob("*.png")],
    "rewritten with the same bytes": lambda folder: (
        (folder / "a/1.png").write_bytes(b"a/1.png"),
        later(folder / "a/1.png"),
    ),
    "a hidden file": lambda folder: (folder / "a/.DS_Store").write_bytes(b"x"),
    "an empty folder": lambda folder: (folder / "c").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read_by_crop", [True, False])
def test_changes_of_files_are_detected(source: Folder, tmp_path: Path, change: str, read_by_crop: bool) -> None:
    path = tmp_path / "source.json"
    same_times(*Path(source.path).rglob("*.png"))
    assert refresh(source, path)
    if read_by_crop:
        cropped(source, path)
    before = path.read_bytes()
    CHANGES[change](Path(source.path))
    assert refresh(source, path)
    assert path.read_bytes() != before
    assert not refresh(source, path)


@pytest.mark.parametrize("change", NO_CHANGES)
def test_unchanged_contents_leave_the_note_untouched(source: Folder, tmp_path: Path, change: str) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    NO_CHANGES[change](Path(source.path))
    for _ in range(2):
        assert not refresh(source, path)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_only_files_whose_time_changed_are_hashed(
    source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)
    hashed: list[str] = []
    monkeypatch.setattr(
        "image_diffusion.data.sources.changes.sha256_file",
        lambda where: (hashed.append(where.name), sha256_file(where))[1],
    )
    later(Path(source.path) / "a/2.png")
    assert not refresh(source, path)
    assert hashed == ["2.png"]
    assert not refresh(source, path)
    assert hashed == ["2.png"]


def test_only_the_folder_of_a_changed_file_is_compared_file_by_file(
    source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)
    compared: list[str] = []
    entries = _Folder.entries
    monkeypatch.setattr(_Folder, "entries", lambda folder: (compared.extend(known := entries(folder)), known)[1])
    assert not refresh(source, path)
    assert compared == []
    (Path(source.path) / "b/3.png").write_bytes(b"B/3.png")
    assert refresh(source, path)
    assert compared == ["3.png"]


def test_listing_order_of_files_does_not_matter(
    source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)

    def backwards(found: FileGroup) -> FileGroup:
        stamps = array("q", [number for i in range(len(found.names))[::-1] for number in found.stamp(i)])
        return replace(found, names=found.names[::-1], stamps=stamps)

    found = [backwards(each) for each in source.file_groups()][::-1]
    monkeypatch.setattr(Folder, "file_groups", lambda _: iter(found))
    assert not refresh(source, path)


def test_damaged_caches_never_hide_changes(source: Folder, tmp_path: Path) -> None:
    path, cache = tmp_path / "source.json", tmp_path / ".source-cache.json"
    refresh(source, path)
    cropped(source, path)
    whole = cache.read_bytes()
    for damaged in (whole[: len(whole) // 2], *(whole[:i] + b"\xff" + whole[i + 1 :] for i in range(len(whole)))):
        cache.write_bytes(damaged)
        refresh(source, path)
        assert not refresh(source, path)
        (Path(source.path) / "a/1.png").write_bytes(os.urandom(9))
        assert refresh(source, path)


def test_file_names_of_arbitrary_bytes_are_recognised(source: Folder, tmp_path: Path) -> None:
    path, odd = tmp_path / "source.json", Path(os.fsdecode(os.fsencode(source.path) + b"/a/\xff\t.png"))
    odd.write_bytes(b"odd")
    assert refresh(source, path)
    cropped(source, path)
    assert not refresh(source, path)
    later(odd)
    assert not refresh(source, path)
    odd.write_bytes(b"ODD")
    assert refresh(source, path) and not refresh(source, path)


def test_stamps_hold_64_bit_file_system_numbers() -> None:
    stamps = array("q")
    add_stamp(stamps, (5, -1, 2**63, 2**64 - 1))
    assert FileGroup("", ["x"], stamps, str).stamp(0) == (5, -1, -(2**63), -1)


def test_note_is_rewritten_after_lost_or_damaged_files_or_another_source(source: Folder, tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    for damage in (b"", b"{}", b"[]", b'{"source": 1}'):
        (tmp_path / ".source-cache.json").write_bytes(damage)
        assert refresh(source, path)
        assert not refresh(source, path)
    whole = path.read_bytes()
    for damage in (b"", whole[:20], b"[]", b"{}"):
        path.write_bytes(damage)
        assert refresh(source, path)
        assert path.read_bytes() == whole
    path.unlink()
    assert refresh(source, path)
    assert refresh(source.model_copy(update={"classes": "none"}), path)


def test_damaged_note_is_restored_with_its_revision(source: Folder, tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)  # the cache has the hashes now; the note was written before
    whole = path.read_bytes()
    for damage in (b"", whole[:20], whole.replace(b'"files": 3', b'"files": 4')):
        path.write_bytes(damage)
        assert refresh(source, path)
        assert path.read_bytes() == whole


def test_a_kill_between_cache_and_note_loses_no_change(source: Folder, tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)
    before = path.read_bytes()
    (Path(source.path) / "a/4.png").write_bytes(b"4")
    refresh(source, path)
    after = path.read_bytes()
    path.write_bytes(before)  # the cache was written, the note was not
    assert refresh(source, path)
    assert path.read_bytes() == after != before


def test_ctime_is_ignored_where_it_is_unreliable(source: Folder, tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    same_times(*Path(source.path).rglob("*.png"))
    assert refresh(source, path, trust_ctime=False)
    cropped(source, path)
    change_places(Path(source.path))
    assert not refresh(source, path, trust_ctime=False)
    later(Path(source.path) / "a/1.png")
    assert refresh(source, path, trust_ctime=False)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"[]", b'{"revision": 1, "seal": "x"}'])
def test_a_damaged_note_is_written_again(source: Folder, tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "source.json"
    refresh(source, path)
    cropped(source, path)
    refresh(source, path)
    path.write_bytes(damage)
    assert refresh(source, path)
    assert not refresh(source, path)
    assert read_json(path)["files"] == 3


def test_the_classes_of_a_folder_are_known_before_any_image_is_read(source: Folder, tmp_path: Path) -> None:
    (tmp_path / "in/empty").mkdir()
    (tmp_path / "in/.hidden").mkdir()
    (tmp_path / "in/.hidden/4.png").touch()
    (tmp_path / "in/readme.txt").touch()
    assert source.known_classes() == ["a", "b"]
    assert Folder(path=source.path, classes="none").known_classes() == []
    assert Folder(path=str(tmp_path / "nowhere")).known_classes() is None


def test_unreadable_files_are_listed_with_the_system_error(source: Folder, tmp_path: Path) -> None:
    (tmp_path / "in/a/loop.png").symlink_to("loop.png")
    (tmp_path / "in/a/nothing.png").symlink_to("nowhere.png")
    assert source.listing().rejected == [
        ("a/loop.png", "too many levels of symbolic links"),
        ("a/nothing.png", "a link to nothing"),
    ]


def test_captions_have_a_size_limit(source: Folder, tmp_path: Path) -> None:
    text = tmp_path / "in/a/1.txt"
    text.write_text("x" * LARGEST_TEXT)
    assert source.read_captions(()) == {"a/1": ["x" * LARGEST_TEXT]}
    text.write_text("x" * (LARGEST_TEXT + 1))
    with pytest.raises(ValueError, match=r"a/1\.txt is no caption: it has 1,048,577 bytes, and one has at most"):
        source.read_captions(())


def test_missing_or_empty_folders_give_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty/.hidden").mkdir(parents=True)
    for name, message in {
        "missing": "does not exist. Give the folder",
        "file": "is not a folder",
        "empty": "holds no files",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            refresh(Folder(path=str(tmp_path / name)), tmp_path / "source.json")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "source.json").exists()


def test_refresh_imports_no_torch(source: Folder, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from image_diffusion.data.config import DataConfig;"
        "from image_diffusion.data.sources.changes import refresh;"
        "refresh(DataConfig(name='x', resolution=8, source={'type': 'folder', 'path': sys.argv[1]}).source,"
        "Path(sys.argv[2])); assert not {'torch', 'numpy', 'PIL'} & sys.modules.keys(), sys.modules.keys()"
    )
    arguments = [sys.executable, "-c", code, source.path, str(tmp_path / "source.json")]
    subprocess.run(arguments, check=True, capture_output=True)
    assert json.loads((tmp_path / "source.json").read_text())["files"] == 3


def test_d38_images_are_listed_in_one_order_whatever_their_extension(tmp_path: Path) -> None:
    """D-38: RIN's original takes files in the disk's order, and only those whose extension is in lower case."""
    for name in ("b.JPG", "a.png", "c.TIFF", "A.Png"):
        (tmp_path / name).write_bytes(b"")
    assert [item.name for item in Folder(path=str(tmp_path)).listing().items] == ["A.Png", "a.png", "b.JPG", "c.TIFF"]
