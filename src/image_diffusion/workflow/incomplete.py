"""Which results Snakemake takes for unfinished, or for made of something else. It has no public door for that: what is
changed here is looked for first, and a Snakemake that has it no longer is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from inspect import iscoroutinefunction
from typing import Any

WRITTEN_FOR = "9.27"

_PART = re.compile(r".*/part-\d+-of-\d+\.(npz|done)")
"""Files of parts: their number depends on the GPUs of this machine, and what is made of them does not."""


def make_unfinished_again(damaged: Callable[[Iterable[str]], bool] | None) -> None:
    """What a killed stage was making is made again, as with --rerun-incomplete: every command goes on from its own
    state and writes whole files. (Snakemake takes that from the command line only, and after it has read the rules.)

    damaged: whether outputs are no longer what a stage wrote: they then count as unfinished; None: nobody looks.
    """
    persistence, settings = _places()

    if damaged is not None:
        unfinished = persistence.incomplete

        async def unfinished_or_damaged(self: Any, job: Any) -> Any:
            return list(job.output) if damaged(job.output) else await unfinished(self, job)

        persistence.incomplete = unfinished_or_damaged
    settings.force_incomplete = property(lambda settings: True, lambda settings, value: None)


def count_no_parts() -> None:
    """What several jobs have shared is not made again where others would share it: of the inputs that a result was made
    of, its parts do not count."""
    persistence, _ = _places()
    changed = persistence._input_changed

    def changed_beside_parts(self: Any, job: Any, file: Any = None) -> bool:
        return bool(changed(self, job, file) and _others(self.input(file)) != _others(self._input(job)))

    persistence._input_changed = changed_beside_parts


def _others(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not _PART.fullmatch(path)]


def _places() -> tuple[Any, Any]:
    try:
        from snakemake.persistence import PersistenceBase
        from snakemake.settings.types import DAGSettings

        known = "force_incomplete" in DAGSettings.__dataclass_fields__ and hasattr(PersistenceBase, "_input_changed")
        if known and iscoroutinefunction(PersistenceBase.incomplete):
            return PersistenceBase, DAGSettings
    except (ImportError, AttributeError):
        pass
    raise SystemExit(
        f"error: Snakemake {version('snakemake')} notes elsewhere what is unfinished than {WRITTEN_FOR}, which this "
        f"workflow was written for. Run: python -m pip install 'snakemake=={WRITTEN_FOR}.*'"
    )
