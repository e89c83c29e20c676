"""Files that were sent to a store on this machine, and a check that they still hold what was sent.

Beside the folder of a run's or a model's artifacts lies `sent.json` with the sha256 of each file that is ours; the
store does not show it. What is damaged is removed before anything is sent, and so is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.files.checksums import damaged, describe
from image_diffusion.core.process.errors import log_line_once

LISTING = "sent.json"


def folder_of(uri: str) -> Path | None:
    """Return the folder that an artifact URI names; None for a place that is not a folder of this machine."""
    place = urlsplit(uri)
    return Path(unquote(place.path)) if place.scheme in ("", "file") else None


def remove_damaged(artifacts: Path) -> list[str]:
    """Remove the files that are not what was sent. Returns the names of those and of missing ones, by their path from
    the folder above `artifacts`; none where nothing was noted."""
    folder = artifacts.parent
    wrong = damaged(folder, _listed(folder))
    for name in wrong:
        (folder / name).unlink(missing_ok=True)
    return wrong


def note_sent(artifacts: Path, names: Iterable[str], wrong: Iterable[str]) -> Path:
    """Record the sha256 of our files, and report which damaged ones were sent again. Returns the listing.

    names: by their path from `artifacts`. wrong: what `remove_damaged` returned.
    """
    folder = artifacts.parent
    files = [path for path in (artifacts / name for name in sorted(set(names))) if path.is_file()]
    for path in (folder / name for name in wrong):
        outcome = "has been sent again" if path.is_file() else "cannot be sent again, as its source is missing"
        log_line_once(f"warning: {path} was damaged or missing and {outcome}.")
    hashes = describe(folder, files)
    if hashes != _listed(folder):
        write_json(folder / LISTING, {"files": hashes})
    return folder / LISTING


def _listed(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file that was sent; empty where that was never noted, or the note is damaged."""
    try:
        return dict(read_json(folder / LISTING)["files"])
    except (ValueError, KeyError, TypeError):
        return {}
