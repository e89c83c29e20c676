"""Partial results of a stage, in a folder beside its output: a stage that was stopped resumes from them.

A batch of work is a file that is whole or absent, and is reused only where everything that decides its numbers is
unchanged: what the stage was given, the code, and the kind of device. No rule declares the folder, so Snakemake leaves
it alone when it removes the output of a job that failed; it is removed when the output has been written.

Several processes of one command, where a launcher started them, share the work; a single process does all of it.
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
from image_diffusion.core.files.npz import read_arrays

T = TypeVar("T")


def share(rows: NDArray[np.int64], at_once: int = 1) -> NDArray[np.int64]:
    """Return the rows of this process: consecutive ones, in the order of the processes. at_once: rows that stay
    together, from the first on."""
    if not dist.is_initialized():
        return rows
    groups: list[NDArray[np.int64]] = np.array_split(np.arange(0, len(rows), at_once), dist.get_world_size())
    own = groups[dist.get_rank()]
    return rows[own[0] : own[-1] + at_once] if len(own) else rows[:0]


def rows_of_part(num_rows: int, at_once: int, part: tuple[int, int]) -> list[slice]:
    """Return the rows of part i of n, (i, n), so many at once: all parts together make the slices of a single one."""
    index, count = part
    starts = range(0, num_rows, at_once)
    own = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
    return [slice(start, min(start + at_once, num_rows)) for start in own]


def gathered(value: T) -> list[T]:
    """Gather a value of each process, tensors on the CPU, in the order of the processes; the same list in all of
    them."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [item for item in values if item is not None]


Arrays = Mapping[str, NDArray[Any]]
"""Arrays that a batch of work gives, by name."""


@contextmanager
def resumable(output: Path, settings: Any, inputs: Sequence[Path | None] = (), writes: bool = True) -> Iterator[None]:
    """Have `batches` keep what they make until what is done here is done, which writes `output`.

    settings: plain data that decides the numbers, with the inputs: files, and folders of files, identified by their
    stamps. writes: whether this process, of several that share the work, is the one that writes the output.
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
    """Return a function that gives a batch of work by its name: computed by a function, or reused from an earlier
    start.

    work: plain data that distinguishes it from other work of the same stage; a second request with the same data gets
    the results of the second time, and so on. Outside of `resumable` nothing is stored.
    """
    partial = _current.get()
    return (lambda name, make: make()) if partial is None else partial.batches(work)


@dataclass
class _PartialResults:
    """settings: decide the numbers. num_requested, num_reused: batches."""

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
            with suppress(ValueError):  # there is none, or it is damaged
                arrays = {array_name: np.array(array) for array_name, array in read_arrays(path).items()}
                self.num_reused += 1
                return arrays
            computed = make()
            # A process that has done the same meanwhile may remove the folder.
            with suppress(FileNotFoundError), atomic_write(path) as file:
                np.savez(file, **computed)  # type: ignore[arg-type]
            return computed

        return cached_batch


_current: ContextVar[_PartialResults | None] = ContextVar("halfway", default=None)


def _stamps(paths: Sequence[Path | None]) -> dict[str, Any]:
    """Return the stamp of each file, and of those in each folder but hidden ones, which are notes of readers."""
    stamps: dict[str, Any] = {}
    for path in paths:
        if path is not None and path.is_dir():
            stamps |= _stamps(sorted(path.glob("[!.]*")))
        elif path is not None and path.is_file():
            stamps[str(path)] = stamp_of(path)
    return stamps
