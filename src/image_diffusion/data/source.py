"""Has the source changed? Asked each time Snakemake starts, so it opens no image and imports no torch.

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

from image_diffusion.core.config import dump
from image_diffusion.core.files import Stamp, atomic_write, digest, is_ahead, read_json, sha256_file, write_json
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.listing import Found, plain_text

Entries = dict[str, tuple[Stamp, str]]
"""Of files by name: the stamp, and the sha256, or an empty text when nobody has read the file yet."""


@dataclass(frozen=True)
class _Folder:
    """What is noted of the files that lie together.

    digest: that of `Found`. content: differs when what they hold does. count: of files. line: reads the line of the
    cache.
    """

    digest: str
    content: str
    count: int
    line: Callable[[], bytes] = field(compare=False)

    def entries(self) -> Entries:
        """What is known of each file; nothing where the line is damaged, so that all of them have changed."""
        try:
            names, stamps, hashes = json.loads(self.line().split(b"\t", 4)[4])
            numbers = array("q", b64decode(stamps))
            found = Found("", names, numbers, str)
            known = hashes or [""] * len(names)
            return {name: (found.stamp(i), str(known[i])) for i, name in enumerate(names)}
        except (ValueError, IndexError, TypeError):
            return {}


Folders = dict[str, _Folder]
"""By the name of the folder."""


def refresh(source: Source, path: Path, trust_ctime: bool = True) -> bool:
    """Write `path` (source.json) if the source is not what it was; returns whether it did.

    trust_ctime: whether the time of the last change and the inode number count; some file systems make them up. Raises
    ValueError when the source is missing or empty.
    """
    counts = slice(None) if trust_ctime else slice(2)
    known, revision = _read_cache(source, path)
    now, differs, num_bytes = Folders(), False, 0
    for found in source.found():
        num_bytes += sum(found.stamps[::4])
        before = (known or {}).get(found.folder)
        if before is not None and before.digest == found.digest():
            now[found.folder] = before
            continue
        hashes, other = _compared(found, before.entries() if before is not None else {}, counts)
        now[found.folder] = _noted(found, hashes)
        differs |= other
    if known is None:
        _write(source, path, now, num_bytes)
        return True
    changed = differs or now.keys() != known.keys()
    noted = _revision(path)
    # not so when it was damaged, or killed before it was written
    whole = noted is not None and revision in (None, noted)
    whole = whole and not is_ahead(path)
    if changed or not whole:
        _write(source, path, now, num_bytes, None if changed else revision)
    elif now != known:
        _write_cache(source, path, now, revision)
    return changed or not whole


def remember(source: Source, path: Path, files: Iterable[Found], hashes: Mapping[str, str]) -> None:
    """Note what crop read: the files as found before it began, and the sha256 of each that it has read, by its name
    from the source on.

    Files it did not read one by one (a tar of many images) are hashed here.
    """

    def hash_of(found: Found, name: str) -> str:
        try:
            return hashes.get(found.folder + plain_text(name)) or sha256_file(Path(found.at(name)))
        except OSError:
            return ""

    noted = {each.folder: _noted(each, [hash_of(each, name) for name in each.names]) for each in files}
    _write_cache(source, path, noted, _revision(path))


def _compared(found: Found, known: Entries, counts: slice) -> tuple[list[str], bool]:
    """The hashes that are still those of the files found, and whether any file is another one than was known."""
    hashes, changed = [], len(found.names) != len(known)
    for number, name in enumerate(found.names):
        stamp = found.stamp(number)
        before, sha = known.get(name, (None, ""))
        same = before is not None and before[counts] == stamp[counts]
        if before is not None and not same:
            same = bool(sha) and before[0] == stamp[0] and sha256_file(Path(found.at(name))) == sha
        hashes.append(sha if same else "")
        changed |= not same
    return hashes, changed


def _noted(found: Found, hashes: list[str]) -> _Folder:
    """What to note of files. Times stand in for the hashes nobody has computed yet."""
    own = found.digest()
    content = own
    if any(hashes):
        files = {name: (found.stamp(i)[0], hashes[i] or found.stamp(i)) for i, name in enumerate(found.names)}
        content = digest({plain_text(name): list(each) for name, each in files.items()})
    stamps = b64encode(found.stamps.tobytes()).decode()
    data = json.dumps([found.names, stamps, hashes if any(hashes) else []])
    line = f"{json.dumps(found.folder)}\t{own}\t{content}\t{len(found.names)}\t{data}\n".encode()
    return _Folder(own, content, len(found.names), lambda: line)


def _write(source: Source, path: Path, folders: Folders, num_bytes: int, revision: str | None = None) -> None:
    """source.json changes whenever the content does. revision: the one it had, where nothing else has changed."""
    if revision is None:
        revision = digest(sorted((name, folder.content) for name, folder in folders.items()))
    _write_cache(source, path, folders, revision)
    files = sum(folder.count for folder in folders.values())
    write_json(path, {"source": dump(source), "files": files, "bytes": num_bytes, "revision": revision})


def _revision(path: Path) -> str | None:
    """What source.json says, when it is whole: it also says how many files there are."""
    try:
        found = read_json(path)
        return str(found["revision"]) if isinstance(found["files"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _cache_path(path: Path) -> Path:
    return path.with_name(f".{path.stem}-cache.json")


def _write_cache(source: Source, path: Path, folders: Folders, revision: str | None) -> None:
    """A line a folder and one of the whole, last, so that a file that was cut is none. Without a seal, which would cost
    seconds for a million files: a damaged line is that of files that changed."""
    with atomic_write(_cache_path(path)) as file:
        for _, folder in sorted(folders.items()):
            file.write(folder.line())
        file.write(json.dumps({"source": dump(source), "revision": revision}).encode() + b"\n")


def _read_cache(source: Source, path: Path) -> tuple[Folders | None, str | None]:
    """What was known of this very source, and the revision it had; None when nothing is."""
    known, cache, start, last = Folders(), _cache_path(path), 0, b""
    try:
        with cache.open("rb") as file:
            for line in file:
                if line.startswith(b'"'):
                    name, own, content, count, _ = line.split(b"\t", 4)
                    there = partial(_read_at, cache, start, len(line))
                    known[json.loads(name)] = _Folder(own.decode(), content.decode(), int(count), there)
                start, last = start + len(line), line
        data = json.loads(last)
        if data["source"] != dump(source):
            return None, None
        revision = data.get("revision")
        return known, revision if isinstance(revision, str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _read_at(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)
