"""Directory listings in C and in Python are equal."""

import errno
import os
import stat
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from image_diffusion.data.sources import entries
from image_diffusion.data.sources.folder import Folder, Walk


def odd(folder: Path) -> None:
    """Entries of all kinds, and names that are not valid text."""
    (folder / "images").mkdir()
    (folder / "images/one.png").write_bytes(b"1")
    (folder / "a\nline.png").write_bytes(b"22")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png")).write_bytes(b"333")
    (folder / ".hidden").write_bytes(b"4444")
    (folder / "to_file.png").symlink_to(folder / "images/one.png")
    (folder / "to_folder").symlink_to(folder / "images")
    (folder / "to_itself").symlink_to(folder / "to_itself")
    (folder / "to_nothing.png").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.png")
    os.utime(folder / "images/one.png", ns=(0, -1_500_000_001))  # before 1970


def many(folder: Path) -> None:
    """More entries than one read returns."""
    for number in range(entries._AT_ONCE + 10):
        (folder / f"{number}.png").touch()


def long(folder: Path) -> None:
    """Names that together exceed the buffer of one read."""
    for number in range(1500):
        (folder / f"{number:0251}.png").touch()


def seen(folder: Path) -> tuple[list[str], list[int], list[int]]:
    """The complete listing of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        names, kinds, stamps = list[str](), array("q"), array("q")
        for some in entries.entries_of(descriptor):
            names += some.names
            kinds += some.kinds
            stamps += some.stamps
        return names, list(kinds), list(stamps)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("fill", [odd, many, long, lambda folder: None], ids=["odd", "many", "long", "empty"])
def test_c_and_python_list_the_same_entries(
    fill: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entries.library() is None:
        pytest.skip("entries.c is not compiled here: python setup.py build_ext --inplace")
    fill(tmp_path)
    compiled, again = seen(tmp_path), seen(tmp_path)
    walk = Walk(str(tmp_path))
    groups = [(group.folder, group.names, group.digest()) for group in walk.file_groups()]
    monkeypatch.setattr(entries, "library", lambda: None)
    assert compiled == again == seen(tmp_path)
    other = Walk(str(tmp_path))
    assert groups == [(group.folder, group.names, group.digest()) for group in other.file_groups()]
    assert (walk.rejected, walk.passed_over) == (other.rejected, other.passed_over)
    names, kinds, stamps = compiled
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert len(kinds) == len(names) and len(stamps) == 4 * len(names)


def test_listing_a_file_raises_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        seen(tmp_path / "file")


def test_entries_have_kinds_and_rejection_reasons(tmp_path: Path) -> None:
    odd(tmp_path)
    names, kinds, stamps = seen(tmp_path)
    of = dict(zip(names, kinds, strict=True))
    assert of["to_file.png"] == stat.S_IFREG and of["to_folder"] == stat.S_IFDIR and of["pipe.png"] == stat.S_IFIFO
    where = 4 * names.index("to_file.png")
    status = (tmp_path / "to_file.png").stat()
    assert stamps[where : where + 4] == [1, -1_500_000_001, status.st_ctime_ns, status.st_ino]
    assert sorted(Folder(path=str(tmp_path), classes="none").listing().rejected)[1:] == [
        ("to_itself", os.strerror(errno.ELOOP).lower()),
        ("to_nothing.png", "a link to nothing"),
    ]
