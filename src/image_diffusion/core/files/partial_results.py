"""Partial results of a stage in a folder next to its output, from which an interrupted stage resumes.

A batch of work is a file that is written atomically, and is reused only if everything that determines its numbers is
unchanged: the inputs of the stage, the code, and the kind of device. No rule declares the folder, so Snakemake keeps it
when it removes the output of a failed job. It is removed when the output has been written.

Processes that a launcher started for one command share the work; a single process does all of it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import atomic_write, code_below, digest, stamp_of
from image_diffusion.core.files.image_arrays import read_arrays

T = TypeVar("T")


def share(rows: NDArray[np.int64], at_once: int = 1) -> NDArray[np.int64]:
    """Return the rows of this process, which are consecutive, in the order of the processes. at_once: size of groups of
    rows that are not split, counted from the first row."""
    if not dist.is_initialized():
        return rows
    groups: list[NDArray[np.int64]] = np.array_split(np.arange(0, len(rows), at_once), dist.get_world_size())
    own = groups[dist.get_rank()]
    return rows[own[0] : own[-1] + at_once] if len(own) else rows[:0]


def rows_of_part(num_rows: int, at_once: int, part: tuple[int, int]) -> list[slice]:
    """Return slices of `at_once` rows for part i of n, (i, n). All parts together have the slices of part (0, 1)."""
    index, count = part
    starts = range(0, num_rows, at_once)
    own = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
    return [slice(start, min(start + at_once, num_rows)) for start in own]


def gathered(value: T) -> list[T]:
    """Return the values of all processes, with tensors on the CPU, in their order; the same list in all."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [item for item in values if item is not None]


Arrays = Mapping[str, NDArray[Any]]
"""Results of a batch of work, by name."""


@contextmanager
def resumable(output: Path, settings: Any, inputs: Sequence[Path | None] = (), writes: bool = True) -> Iterator[None]:
    """Store the results of `batches` until the end of this context, in which `output` is written.

    settings: plain data that determines the numbers. inputs: files, and folders of files, which are identified by their
    stamps. writes: True if this process is the one that writes the output.
    """
    code = code_below(Path(__file__).parents[2])
    with_what = {"code": code, "torch": torch.__version__, "device": best_device().type}
    partial = _PartialResults(partial_folder(output), {"given": settings, "inputs": _stamps(inputs), **with_what})
    token = _current.set(partial)
    try:
        yield
    finally:
        _current.reset(token)
    reused, requested = map(sum, zip(*gathered((partial.num_reused, partial.num_requested)), strict=True))
    if writes:
        if reused:
            print(f"{output.name}: {reused:,} of {requested:,} batches are reused from an earlier run.", flush=True)
        shutil.rmtree(partial.folder, ignore_errors=True)


def partial_folder(output: Path) -> Path:
    """Return the folder that holds the partial results of an output."""
    return output.with_name(f".{output.name}.halfway")


def batches(work: Any) -> Callable[[str, Callable[[], Arrays]], Arrays]:
    """Return a function that returns a batch of work by its name, computed by a function or reused from an earlier
    start.

    work: plain data that distinguishes it from other work of the same stage; the n-th call with the same data reuses
    the results of the n-th call of an earlier start. Outside of `resumable` nothing is stored.
    """
    partial = _current.get()
    return (lambda name, make: make()) if partial is None else partial.batches(work)


@dataclass
class _PartialResults:
    """Partial results of one output. settings: determine the numbers. num_requested, num_reused: numbers of batches."""

    folder: Path
    settings: dict[str, Any]
    num_requested: int = 0
    num_reused: int = 0
    _times: Counter[str] = field(default_factory=Counter)

    def batches(self, work: Any) -> Callable[[str, Callable[[], Arrays]], Arrays]:
        kind = digest([work, self.settings])
        self._times[kind] += 1
        folder = self.folder / f"{kind}-{self._times[kind]}"

        def cached_batch(name: str, make: Callable[[], Arrays]) -> Arrays:
            path = folder / f"{name}.npz"
            self.num_requested += 1
            with suppress(ValueError):  # missing or damaged
                arrays = {array_name: np.array(array) for array_name, array in read_arrays(path).items()}
                self.num_reused += 1
                return arrays
            computed = make()
            # Another process that finishes the same work may remove the folder.
            with suppress(FileNotFoundError), atomic_write(path) as file:
                np.savez(file, **computed)  # type: ignore[arg-type]
            return computed

        return cached_batch


_current: ContextVar[_PartialResults | None] = ContextVar("halfway", default=None)


def _stamps(paths: Sequence[Path | None]) -> dict[str, Any]:
    """Return the stamp of each file, and of the files in each folder except hidden ones, which readers write."""
    stamps: dict[str, Any] = {}
    for path in paths:
        if path is not None and path.is_dir():
            stamps |= _stamps(sorted(path.glob("[!.]*")))
        elif path is not None and path.is_file():
            stamps[str(path)] = stamp_of(path)
    return stamps
