"""Which results Snakemake takes for unfinished. It has no public door for that: what is changed here is looked for
first, and a Snakemake that has it no longer is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from inspect import iscoroutinefunction
from typing import Any

WRITTEN_FOR = "9.27"


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


def _places() -> tuple[Any, Any]:
    try:
        from snakemake.persistence import PersistenceBase
        from snakemake.settings.types import DAGSettings

        if "force_incomplete" in DAGSettings.__dataclass_fields__ and iscoroutinefunction(PersistenceBase.incomplete):
            return PersistenceBase, DAGSettings
    except (ImportError, AttributeError):
        pass
    raise SystemExit(
        f"error: Snakemake {version('snakemake')} notes elsewhere what is unfinished than {WRITTEN_FOR}, which this "
        f"workflow was written for. Run: python -m pip install 'snakemake=={WRITTEN_FOR}.*'"
    )
