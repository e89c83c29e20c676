"""Detection of changes of a source. It runs each time Snakemake starts, so it opens no image and imports no torch.

`refresh` writes `source.json`, the input of the crop rule, and leaves the file untouched while the content of the
source is the same. It compares names and the stamps of files: size and modification time, and change time and inode
number, which no program can set. A file with the same size but a different stamp is hashed, and the hash is compared
with the one that crop recorded. So touching or copying files re-runs nothing, two swapped images are detected even if
`tar` or `rsync` gave them the same time, and a check costs one `stat` per file. The modification time of a folder is no
substitute: editing a file in place does not change it.

A cache next to `source.json` stores names, stamps and hashes, one line per folder. Only the digest is parsed while the
folder is unchanged, so a million files take no more memory than their largest folder. Without the cache (in a fresh
clone, or after it was deleted) the crop rule runs and finds that its shards are up to date.
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
from image_diffusion.core.files.atomic import (
    Stamp,
    atomic_write,
    digest,
    is_in_future,
    read_json,
    sha256_file,
    write_json,
)
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import FileGroup, plain_text

Entries = dict[str, tuple[Stamp, str]]
"""Stamp and sha256 of each file by name; the sha256 is empty if the file has not been read yet."""


@dataclass(frozen=True)
class _Folder:
    """Cached state of the files in one folder.

    digest: `FileGroup.digest`. content: digest that changes when the content of a file does. count: number of files.
    line: function that reads the folder's line of the cache.
    """

    digest: str
    content: str
    count: int
    line: Callable[[], bytes] = field(compare=False)

    def entries(self) -> Entries:
        """Return the entry of each file; none if the line is damaged, so that all files count as changed."""
        try:
            names, stamps, hashes = json.loads(self.line().split(b"\t", 4)[4])
            numbers = array("q", b64decode(stamps))
            group = FileGroup("", names, numbers, str)
            contents = hashes or [""] * len(names)
            return {name: (group.stamp(i), str(contents[i])) for i, name in enumerate(names)}
        except (ValueError, IndexError, TypeError):
            return {}


Folders = dict[str, _Folder]
"""Cached state of each folder, by its name."""


def refresh(source: Source, path: Path, trust_ctime: bool = True) -> bool:
    """Write `path` (source.json) if the source has changed; returns whether it was written.

    trust_ctime: whether change times and inode numbers count; some file systems invent them. Raises ValueError when the
    source is missing or empty.
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
    # False if the file is damaged, or the process was killed before writing it
    whole = noted is not None and revision in (None, noted)
    whole = whole and not is_in_future(path)
    if changed or not whole:
        _write(source, path, now, num_bytes, None if changed else revision)
    elif now != cached:
        _write_cache(source, path, now, revision)
    return changed or not whole


def record_source(source: Source, path: Path, files: Iterable[FileGroup], hashes: Mapping[str, str]) -> None:
    """Record what crop read. files: listed before it began. hashes: sha256 of each file that it read, by its path
    within the source.

    Files that crop did not read one by one, such as a tar of many images, are hashed here.
    """

    def hash_of(group: FileGroup, name: str) -> str:
        try:
            return hashes.get(group.folder + plain_text(name)) or sha256_file(Path(group.at(name)))
        except OSError:
            return ""

    noted = {group.folder: _noted(group, [hash_of(group, name) for name in group.names]) for group in files}
    _write_cache(source, path, noted, _revision(path))


def _compared(group: FileGroup, entries: Entries, counts: slice) -> tuple[list[str], bool]:
    """Return the hash of each file, empty unless the file is unchanged, and whether any file changed."""
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
    """Return the state of the files to cache. Stamps stand in for hashes that have not been computed yet."""
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
    """Write source.json, which changes whenever the content does. revision: the previous one, if the content is
    unchanged."""
    if revision is None:
        revision = digest(sorted((name, folder.content) for name, folder in folders.items()))
    _write_cache(source, path, folders, revision)
    files = sum(folder.count for folder in folders.values())
    write_json(path, {"source": dump(source), "files": files, "bytes": num_bytes, "revision": revision})


def _revision(path: Path) -> str | None:
    """Return the revision in source.json; None unless the file is valid and states the number of files."""
    try:
        note = read_json(path)
        return str(note["revision"]) if isinstance(note["files"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _cache_path(path: Path) -> Path:
    return path.with_name(f".{path.stem}-cache.json")


def _write_cache(source: Source, path: Path, folders: Folders, revision: str | None) -> None:
    """Write the cache: one line per folder, and a last line about the source, so that a truncated file is invalid.
    There is no checksum, which would take seconds for a million files: the files of a damaged line count as changed."""
    with atomic_write(_cache_path(path)) as file:
        for _, folder in sorted(folders.items()):
            file.write(folder.line())
        file.write(json.dumps({"source": dump(source), "revision": revision}).encode() + b"\n")


def _read_cache(source: Source, path: Path) -> tuple[Folders | None, str | None]:
    """Return the cached state of the source's folders, and its revision; None if the cache has none for this source."""
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
