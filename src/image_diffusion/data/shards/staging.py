"""Staging of data near the GPU: shards are copied to a node's own disk while training begins on those of the
network."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from image_diffusion.data.shards.reader import Shards

_FREE = 0.9
"""Maximum share of the free disk space that copies take."""


def begin_staging(sets: Sequence[Shards], folder: str, part: float = 0.0) -> threading.Thread | None:
    """Begin to copy the shards of these sets, which may share shards, to a folder, and to read them from there.

    folder: created if it is missing; $NAME in it is an environment variable. part: position in a set at which to begin,
    from 0 to 1, so that the processes of a node copy different shards. Returns the thread that copies; None, with a
    note, if the disk has no room. If the disk fills up later, the copying ends with a note and the training continues.
    Raises ValueError when the folder cannot be made, or an environment variable is not set.
    """
    place = Path(os.path.expandvars(folder)).expanduser()
    if unset := re.search(r"\$\{?(\w+)", str(place)):
        raise ValueError(
            f"resources.stage_to is {folder}, but the environment variable {unset[1]} is not set on this node. Set it, "
            f"or name a folder."
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"resources.stage_to is {folder}, which cannot be made: {error.strerror}. Name a folder of the node's own "
            f"disk, or leave it empty."
        ) from None
    wanted = {entry["sha256"]: entry["bytes"] for shards in sets for entry in shards.manifest["shards"]}
    missing = sum(size for sha256, size in wanted.items() if not (place / sha256).is_file())
    free = shutil.disk_usage(place).free
    if missing > _FREE * free:
        _tell(f"{place} has {free / 1e9:.1f} GB free, and the shards take {missing / 1e9:.1f} GB")
        return None
    copying = threading.Thread(target=_copy, args=(sets, place, part), name="staging", daemon=True)
    copying.start()
    return copying


def _copy(sets: Sequence[Shards], place: Path, part: float) -> None:
    try:
        for shards in sets:
            shards.copy_to(place, int(part * len(shards.manifest["shards"])))
    except (ValueError, OSError) as error:
        _tell(str(error).rstrip("."))


def _tell(reason: str) -> None:
    print(f"note: shards are read in place: {reason}.", file=sys.stderr, flush=True)
