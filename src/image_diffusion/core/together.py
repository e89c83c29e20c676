"""Work that the processes of one command share, where a launcher started several; alone, each does all of it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")


def share(rows: NDArray[np.int64], at_once: int = 1) -> NDArray[np.int64]:
    """The rows of this process: consecutive ones, in the order of the processes. at_once: rows that stay together, from
    the first on."""
    if not dist.is_initialized():
        return rows
    groups: list[NDArray[np.int64]] = np.array_split(np.arange(0, len(rows), at_once), dist.get_world_size())
    mine = groups[dist.get_rank()]
    return rows[mine[0] : mine[-1] + at_once] if len(mine) else rows[:0]


def rows_of_part(num_rows: int, at_once: int, part: tuple[int, int]) -> list[slice]:
    """The rows of part i of n, (i, n), so many at once: all parts together make the slices of a single one."""
    index, of = part
    starts = range(0, num_rows, at_once)
    mine = starts[len(starts) * index // of : len(starts) * (index + 1) // of]
    return [slice(start, min(start + at_once, num_rows)) for start in mine]


def gathered(value: T) -> list[T]:
    """A value of each process, tensors on the CPU, in the order of the processes; the same list in all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [each for each in values if each is not None]
