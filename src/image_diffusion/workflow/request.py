"""What a workflow is about to ask of a queue, as a table: a mistake is cheaper here than after a night in the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

_COLUMNS = {
    "nodes": "Nodes",
    "gres": "GPUs",
    "cpus_per_task": "Cores",
    "mem_mb": "Memory (MB)",
    "runtime": "Time (min)",
    "slurm_partition": "Partition",
    "qos": "QOS",
}
_NONE = "-"


def request(jobs: Iterable[Any]) -> str:
    """A line for the jobs of a rule, or of rules that share one, that ask for the same on each node. jobs: Snakemake's,
    those that will run.

    Empty where all of them run on this machine.
    """
    lines = Counter(
        (_stages(job), *(str(job.resources.get(key) or _NONE) for key in _COLUMNS)) for job in jobs if not job.is_local
    )
    if not lines:
        return ""
    used = [0, *(place for place in range(1, 1 + len(_COLUMNS)) if any(line[place] != _NONE for line in lines))]
    head = ("Stage", *_COLUMNS.values())
    table = [[*(head[place] for place in used), "Jobs"]]
    table += [[*(line[place] for place in used), str(number)] for line, number in sorted(lines.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "\n".join(["Asked of the queue, for each job:", *rows])


def _stages(job: Any) -> str:
    return ", ".join(sorted(job.rules)) if job.is_group() else str(job.rule.name)
