"""File names from untrusted files: validated by type, and safely joined to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import StringConstraints

from image_diffusion.core.config.base import parse

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]
"""Name of a file directly in a folder, as read from an untrusted JSON file."""

TarName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.tar$", max_length=255)]
"""`FileName` of a tar. (Of two patterns on one type, pydantic would keep only the last.)"""

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
"""Digest of a file, in hexadecimal."""

Hashes = dict[FileName, Sha256]
"""Digests of files by name."""


def inside(folder: Path, name: str, follow: bool = False) -> Path:
    """Join a folder and a relative path that was read from a file.

    follow: accept a symbolic link that leads out of the folder, as in download caches; only for content whose sha256 is
    checked before use, and never for a file to write. Raises ValueError for a path that leaves the folder.
    """
    parts = PurePosixPath(name).parts
    leaves = not parts or "\0" in name or name.startswith("/") or ".." in parts
    if leaves or not (follow or (folder / name).resolve().is_relative_to(folder.resolve())):
        raise ValueError(
            f"{name!r} is not the name of a file inside {folder}. Delete the file that names it, or get it from a "
            f"source that you trust."
        )
    return folder / name


def carried_files(folder: Path, model: Mapping[str, Any]) -> dict[str, Path]:
    """Return the paths of the files that accompany the weights in a folder, by name. model: content of model.json.
    Raises ValueError for names outside of the folder.
    """
    hashes = parse(Hashes, model.get("carried", {}), f"{folder}/model.json: carried")
    return {name: inside(folder, name) for name in hashes}
