"""Has the source changed? Asked each time Snakemake starts, so it opens no image and imports no torch.

`refresh` writes `source.json`, the input of the crop rule, and leaves the file untouched while the content of the
source is the same. It looks at names and at the stamps of files: size, modification time, and what no program can
set, the time of the last change and the inode number. Only a file whose size is the same but whose stamp is not is
hashed and compared with the hash that crop noted when it read it. So touching or copying files re-runs nothing, two
images that change places are seen even where `tar` or `rsync` gave them one time, and looking again costs one `stat`
a file. A private cache beside `source.json` remembers all this; without it (a fresh clone, or somebody deleted it)
the crop rule runs, and finds for itself that its shards are up to date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_diffusion.core.config import dump
from image_diffusion.core.files import Stamp, digest, is_ahead, read_json, sha256_file, to_json, write_json, write_text
from image_diffusion.data.sources import Source

Entry = tuple[Stamp, str]
"""The stamp of a file, and its sha256, or an empty text when nobody has read the file yet."""
Entries = dict[str, Entry]
"""The same by name."""


def refresh(source: Source, path: Path, trust_ctime: bool = True) -> bool:
    """Write `path` (source.json) if the source is not what it was; returns whether it did.

    trust_ctime: whether the time of the last change and the inode number count; some file systems make them up. Raises
    ValueError when the source is missing or empty.
    """
    counts = slice(None) if trust_ctime else slice(2)
    files = source.files()
    known, revision = _read_cache(source, path)
    if known is None:
        _write(source, path, {name: (stamp, "") for name, (_, stamp) in files.items()})
        return True
    now, changed = {}, files.keys() != known.keys()
    for name, (where, stamp) in files.items():
        before = known.get(name)
        now[name] = _entry(stamp, before, counts)
        if before is None or before[0][counts] == stamp[counts]:
            continue
        if before[1] and before[0][0] == stamp[0] and sha256_file(Path(where)) == before[1]:
            now[name] = (stamp, before[1])
        else:
            changed = True
    noted = _revision(path)
    whole = noted is not None and revision in (
        None,
        noted,
    )  # not so when it was damaged, or killed before it was written
    whole = whole and not is_ahead(path)
    if changed or not whole:
        _write(source, path, now, None if changed else revision)
    elif now != known:
        _write_cache(source, path, now, revision)
    return changed or not whole


def remember(source: Source, path: Path, files: dict[str, tuple[str, Stamp]], hashes: dict[str, str]) -> None:
    """Note what crop read: the files as they were listed before it began, and the sha256 of each it has read.

    Files it did not read one by one (a tar of many images) are hashed here.
    """
    entries: Entries = {}
    for name, (where, stamp) in files.items():
        try:
            entries[name] = (stamp, hashes.get(name) or sha256_file(Path(where)))
        except OSError:
            entries[name] = (stamp, "")
    _write_cache(source, path, entries, _revision(path))


def _entry(stamp: Stamp, before: Entry | None, counts: slice) -> Entry:
    """What is known of a file now: its hash too, as long as its stamp is what it was."""
    return stamp, before[1] if before is not None and before[0][counts] == stamp[counts] else ""


def _write(source: Source, path: Path, entries: Entries, revision: str | None = None) -> None:
    """source.json changes whenever the content does; times stand in for the hashes nobody has computed yet.

    revision: the one it had, where nothing else has changed.
    """
    if revision is None:
        revision = digest([[name, stamp[0], sha256 or stamp] for name, (stamp, sha256) in sorted(entries.items())])
    _write_cache(source, path, entries, revision)
    write_json(path, {"source": dump(source), "files": len(entries), "revision": revision})


def _revision(path: Path) -> str | None:
    """What source.json says, when it is whole: it also says how many files there are."""
    try:
        found = read_json(path)
        return str(found["revision"]) if isinstance(found["files"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _cache_path(path: Path) -> Path:
    return path.with_name(f".{path.stem}-cache.json")


def _write_cache(source: Source, path: Path, entries: Entries, revision: str | None) -> None:
    """Without a seal, which would cost seconds for a million files: a damaged entry is that of a file that changed."""
    files = {name: [*stamp, sha256] for name, (stamp, sha256) in sorted(entries.items())}
    write_text(_cache_path(path), to_json({"source": dump(source), "revision": revision, "files": files}))


def _read_cache(source: Source, path: Path) -> tuple[Entries | None, str | None]:
    """What was known of this very source, and the revision it had; None when nothing is."""
    try:
        data: dict[str, Any] = read_json(_cache_path(path))
        if data["source"] != dump(source):
            return None, None
        known: Entries = {}
        for name, (size, modified, changed, inode, sha256) in data["files"].items():
            known[name] = (int(size), int(modified), int(changed), int(inode)), str(sha256)
        revision = data.get("revision")
        return known, revision if isinstance(revision, str) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
