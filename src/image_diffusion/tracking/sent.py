"""Files that were sent to a store on this machine, and a check that they have not changed since.

`sent.json`, next to the folder of artifacts of a run or model, has the sha256 of each file that this package sent; the
store does not show it. Damaged files are removed before anything is sent, so that they are sent again.
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
    """Return the folder that an artifact URI names; None for a URI that is not a folder of this machine."""
    place = urlsplit(uri)
    return Path(unquote(place.path)) if place.scheme in ("", "file") else None


def remove_damaged(artifacts: Path) -> list[str]:
    """Remove files that have changed since they were sent. Returns the paths of these and of missing files, relative to
    the folder above `artifacts`; empty without a record."""
    folder = artifacts.parent
    wrong = damaged(folder, _listed(folder))
    for name in wrong:
        (folder / name).unlink(missing_ok=True)
    return wrong


def note_sent(artifacts: Path, names: Iterable[str], wrong: Iterable[str]) -> Path:
    """Record the sha256 of the sent files, and report which damaged ones were sent again. Returns the listing.

    names: paths relative to `artifacts`. wrong: result of `remove_damaged`.
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
    """Return the sha256 of each file that was sent; empty without a record or with a damaged one."""
    try:
        return dict(read_json(folder / LISTING)["files"])
    except (ValueError, KeyError, TypeError):
        return {}
