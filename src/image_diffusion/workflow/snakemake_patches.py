"""The two patches of Snakemake's internals, which have no public interface: which results count as unfinished, and
which inputs count when a result is compared with its record. Both are looked up before they are replaced; a Snakemake
version without them is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from inspect import iscoroutinefunction
from typing import Any

TESTED = ">=9.20,<10"
"""Versions of Snakemake that the project allows; the oldest and the newest of them are tested."""

_PART = re.compile(r".*/part-\d+-of-\d+\.(npz|done)")
"""Files of parts: their number depends on the GPUs of this machine, but the joined result does not."""


def count_damaged_as_unfinished(damaged: Callable[[Iterable[str]], bool]) -> None:
    """Make Snakemake treat damaged results like those of a killed stage: `--rerun-incomplete`, which the profiles set,
    makes them again.

    damaged: returns True if outputs of a job are no longer as its stage wrote them.
    """
    persistence = _persistence_class()
    unfinished = persistence.incomplete

    async def unfinished_or_damaged(self: Any, job: Any) -> Any:
        return list(job.output) if damaged(job.output) else await unfinished(self, job)

    persistence.incomplete = unfinished_or_damaged


def ignore_parts_in_records() -> None:
    """Keep a result if the number of its parts changes: parts are ignored in the inputs that Snakemake recorded."""
    persistence = _persistence_class()
    changed = persistence._input_changed

    def changed_beside_parts(self: Any, job: Any, file: Any = None) -> bool:
        return bool(changed(self, job, file) and _without_parts(self.input(file)) != _without_parts(self._input(job)))

    persistence._input_changed = changed_beside_parts


def _without_parts(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not _PART.fullmatch(path)]


def _persistence_class() -> Any:
    from snakemake import persistence

    # A class in older versions; later, the base class of two, for files and for databases.
    base = getattr(persistence, "PersistenceBase", None) or getattr(persistence, "Persistence", None)
    if base is not None and hasattr(base, "_input_changed") and iscoroutinefunction(getattr(base, "incomplete", None)):
        return base
    raise SystemExit(
        f"error: Snakemake {version('snakemake')} keeps its records in another way than those that this workflow works "
        f"with. Run: python -m pip install 'snakemake{TESTED}'"
    )
