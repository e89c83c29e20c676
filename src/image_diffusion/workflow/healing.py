"""Whether results are what their stages wrote: Snakemake sees a file that is missing or new, and nothing else.

What was damaged, or removed where no rule declares it, counts as unfinished, so that the same command makes it again.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from image_diffusion.core.files import is_whole_page, read_checksums, read_json
from image_diffusion.data.verify import AT_ONCE_BYTES, damaged, unverified_bytes


class Damage:
    """Looks at each result once, and tells once what is wrong with it. store: where MLflow keeps the runs, an URI."""

    def __init__(self, store: str) -> None:
        self._store, self._known = store, dict[str, bool]()

    def among(self, outputs: Iterable[str]) -> bool:
        """Whether one of a job's outputs that are there is not what the job wrote, or lacks what goes with it."""
        damaged_ones = [path for path in outputs if Path(path).exists() and self._is_damaged(path)]
        return bool(damaged_ones)

    def _is_damaged(self, path: str) -> bool:
        if path not in self._known:
            fault = fault_of(Path(path), self._store)
            self._known[path] = fault is not None
            if fault is not None:
                print(f"{path} is made again: {fault}", file=sys.stderr)
        return self._known[path]


def fault_of(path: Path, store: str) -> str | None:
    """What is wrong with a result, in a few words; None for one that is as its stage wrote it.

    store: where MLflow keeps the runs, which tracked.json says were sent. Files that a stage describes in another one
    of its own, weights in model.json for instance, are looked at with that.
    """
    look = _LOOKS.get(path.name)
    if look is None and path.suffix == ".html":
        look = _page
    if look is None and re.fullmatch(r"part-\d+-of-\d+\.npz", path.name):
        look = _archive
    if look is None and path.is_dir() and path.name == "diffusers":
        look = _folder
    try:
        if path.name == "tracked.json":
            return _tracked(path, store)
        return None if look is None else look(path)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        return f"{error}" if isinstance(error, ValueError | OSError) else "it is not complete"


def _manifest(path: Path) -> str | None:
    manifest = read_json(path)
    shards = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    return _compared(path.parent, {**shards, "index.npy": manifest["index"], **manifest["files"]})


def _model(path: Path) -> str | None:
    model = read_json(path)
    fault = _compared(path.parent, {"weights.safetensors": model["sha256"]})
    if fault is None and path.parent.name == "train" and model["train"]["keep_raw"]:
        return _model(path.parent / "raw" / "model.json")
    return fault


def _detector(path: Path) -> str | None:
    return _compared(path.parent, {"detector.safetensors": read_json(path)["sha256"]})


def _described(path: Path) -> str | None:
    return _compared(path.parent, read_json(path)["files"])


def _tracked(path: Path, store: str) -> str | None:
    """A store that is a file has every run that was sent; of a server this is not asked."""
    tracked = read_json(path)
    if not store.startswith("sqlite:///"):
        return None
    file = Path(store.removeprefix("sqlite:///"))
    if not file.is_file():
        return f"{file} is not there"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            known = {row[0] for row in database.execute("SELECT run_uuid FROM runs")}
    except sqlite3.OperationalError as error:
        return None if "locked" in str(error) else f"{file}: {error}"  # somebody writes into it now
    except sqlite3.Error as error:
        return f"{file}: {error}"
    missing = [run["run_id"] for run in tracked["runs"] if run["run_id"] not in known]
    return f"{file} lacks {len(missing):,} of its {len(tracked['runs']):,} runs" if missing else None


def _page(path: Path) -> str | None:
    return None if is_whole_page(path) else "it is not what was written"


def _archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return "it is not what was written" if archive.testzip() else None
    except zipfile.BadZipFile as error:
        return str(error)


def _folder(path: Path) -> str | None:
    return _compared(path.parent, {f"{path.name}/{name}": sha256 for name, sha256 in read_checksums(path).items()})


_LOOKS: Mapping[str, Callable[[Path], str | None]] = {
    "manifest.json": _manifest,
    "detector.json": _detector,
    "model.json": _model,
    "samples.json": _described,
    "metrics.json": _described,
    "curve.json": _described,
}


def _compared(folder: Path, files: Mapping[str, Any]) -> str | None:
    """Compare files with their sha256, each once for its stamp."""
    size = unverified_bytes(folder, files)
    if size > AT_ONCE_BYTES:
        print(f"Looking through {size / 1e9:,.0f} GB in {folder} that nobody has read yet.", file=sys.stderr)
    wrong = damaged(folder, files)
    if not wrong:
        return None
    fault = "is not what was written" if (folder / wrong[0]).exists() else "is missing"
    return f"{wrong[0]} {fault}" + (f", like {len(wrong) - 1:,} other files" if wrong[1:] else "")
