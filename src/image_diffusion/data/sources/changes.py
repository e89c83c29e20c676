"""Detection of changes of a source. Run each time Snakemake starts, so it opens no image and imports no torch.

`refresh` writes `source.json`, the input of the crop rule, and leaves the file untouched while the content of the
source is the same. It looks at names and at the stamps of files: size, modification time, and what no program can
set, the time of the last change and the inode number. Only a file whose size is the same but whose stamp is not is
hashed and compared with the hash that crop noted when it read it. So touching or copying files re-runs nothing, two
images that change places are seen even where `tar` or `rsync` gave them one time, and looking again costs one `stat`
a file. The time of a folder would not do in its place: a file that is edited where it lies leaves it as it was.

A private cache beside `source.json` remembers all this, a line a folder, of which only the digest is read while the
folder is what it was: a million files take no more memory than their largest folder. Without the cache (a fresh clone,
or somebody deleted it) the crop rule runs, and finds for itself that its shards are up to date.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import Stamp, atomic_write, digest, is_ahead, read_json, sha256_file, write_json
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import FileGroup, plain_text

Entries = dict[str, tuple[Stamp, str]]
"""Entries of files by name: the stamp, and the sha256, or an empty text when the file has not been read yet."""


@dataclass(frozen=True)
class _Folder:
    """Notes on the files that lie together.

    digest: that of `Found`. content: differs when what they hold does. count: of files. line: reads the line of the
    cache.
    """

    digest: str
    content: str
    count: int
    line: Callable[[], bytes] = field(compare=False)

    def entries(self) -> Entries:
        """Return the entry of each file; empty where the line is damaged, so that all of them have changed."""
        try:
            names, stamps, hashes = json.loads(self.line().split(b"\t", 4)[4])
            numbers = array("q", b64decode(stamps))
            group = FileGroup("", names, numbers, str)
            contents = hashes or [""] * len(names)
            return {name: (group.stamp(i), str(contents[i])) for i, name in enumerate(names)}
        except (ValueError, IndexError, TypeError):
            return {}


Folders = dict[str, _Folder]
"""By the name of the folder."""


def refresh(source: Source, path: Path, trust_ctime: bool = True) -> bool:
    """Write `path` (source.json) if the source has changed; returns whether it was written.

    trust_ctime: whether the time of the last change and the inode number count; some file systems make them up. Raises
    ValueError when the source is missing or empty.
    """
    counts = slice(None) if trust_ctime else slice(2)
    cached, revision = _read_cache(source, path)
    now, differs, num_bytes = Folders(), False, 0
    for group in source.file_groups():
        num_bytes += sum(group.stamps[::4])
        before = (cached or {}).get(group.folder)
        if before is not None and before.digest == group.digest():
            now[group.folder] = before
            continue
        hashes, other = _compared(group, before.entries() if before is not None else {}, counts)
        now[group.folder] = _noted(group, hashes)
        differs |= other
    if cached is None:
        _write(source, path, now, num_bytes)
        return True
    changed = differs or now.keys() != cached.keys()
    noted = _revision(path)
    # not so when it was damaged, or killed before it was written
    whole = noted is not None and revision in (None, noted)
    whole = whole and not is_ahead(path)
    if changed or not whole:
        _write(source, path, now, num_bytes, None if changed else revision)
    elif now != cached:
        _write_cache(source, path, now, revision)
    return changed or not whole


def remember(source: Source, path: Path, files: Iterable[FileGroup], hashes: Mapping[str, str]) -> None:
    """Note what crop read: the files as found before it began, and the sha256 of each that it has read, by its name
    from the source on.

    Files it did not read one by one (a tar of many images) are hashed here.
    """

    def hash_of(group: FileGroup, name: str) -> str:
        try:
            return hashes.get(group.folder + plain_text(name)) or sha256_file(Path(group.at(name)))
        except OSError:
            return ""

    noted = {group.folder: _noted(group, [hash_of(group, name) for name in group.names]) for group in files}
    _write_cache(source, path, noted, _revision(path))


def _compared(group: FileGroup, entries: Entries, counts: slice) -> tuple[list[str], bool]:
    """The hashes that are still those of the files found, and whether any file is another one than was known."""
    hashes, changed = [], len(group.names) != len(entries)
    for number, name in enumerate(group.names):
        stamp = group.stamp(number)
        before, sha = entries.get(name, (None, ""))
        same = before is not None and before[counts] == stamp[counts]
        if before is not None and not same:
            same = bool(sha) and before[0] == stamp[0] and sha256_file(Path(group.at(name))) == sha
        hashes.append(sha if same else "")
        changed |= not same
    return hashes, changed


def _noted(group: FileGroup, hashes: list[str]) -> _Folder:
    """Return the notes to keep of files. Times stand in for hashes that have not been computed yet."""
    own = group.digest()
    content = own
    if any(hashes):
        files = {name: (group.stamp(i)[0], hashes[i] or group.stamp(i)) for i, name in enumerate(group.names)}
        content = digest({plain_text(name): list(entry) for name, entry in files.items()})
    stamps = b64encode(group.stamps.tobytes()).decode()
    data = json.dumps([group.names, stamps, hashes if any(hashes) else []])
    line = f"{json.dumps(group.folder)}\t{own}\t{content}\t{len(group.names)}\t{data}\n".encode()
    return _Folder(own, content, len(group.names), lambda: line)


def _write(source: Source, path: Path, folders: Folders, num_bytes: int, revision: str | None = None) -> None:
    """Write source.json, which changes whenever the content does. revision: the one it had, where nothing else has
    changed."""
    if revision is None:
        revision = digest(sorted((name, folder.content) for name, folder in folders.items()))
    _write_cache(source, path, folders, revision)
    files = sum(folder.count for folder in folders.values())
    write_json(path, {"source": dump(source), "files": files, "bytes": num_bytes, "revision": revision})


def _revision(path: Path) -> str | None:
    """Return the revision in source.json, when it is whole: it also says how many files exist."""
    try:
        note = read_json(path)
        return str(note["revision"]) if isinstance(note["files"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _cache_path(path: Path) -> Path:
    return path.with_name(f".{path.stem}-cache.json")


def _write_cache(source: Source, path: Path, folders: Folders, revision: str | None) -> None:
    """Write the cache: a line a folder and one of the whole, last, so that a truncated file is not valid. Without a
    seal, which would cost seconds for a million files: a damaged line is that of files that changed."""
    with atomic_write(_cache_path(path)) as file:
        for _, folder in sorted(folders.items()):
            file.write(folder.line())
        file.write(json.dumps({"source": dump(source), "revision": revision}).encode() + b"\n")


def _read_cache(source: Source, path: Path) -> tuple[Folders | None, str | None]:
    """Read the cached notes on this very source, and the revision it had; None when the cache has none."""
    folders, cache, start, last = Folders(), _cache_path(path), 0, b""
    try:
        with cache.open("rb") as file:
            for line in file:
                if line.startswith(b'"'):
                    name, own, content, count, _ = line.split(b"\t", 4)
                    line_at = partial(_read_at, cache, start, len(line))
                    folders[json.loads(name)] = _Folder(own.decode(), content.decode(), int(count), line_at)
                start, last = start + len(line), line
        data = json.loads(last)
        if data["source"] != dump(source):
            return None, None
        revision = data.get("revision")
        return folders, revision if isinstance(revision, str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _read_at(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)
