"""What a stage has made so far, in a folder beside its output: one that was stopped goes on from there.

A batch of work is a file that is whole or absent, and is found again only where everything that decides its numbers is
what it was: what the stage was given, the code, and the kind of device. No rule declares the folder, so Snakemake
leaves it alone when it removes the output of a job that failed; it goes when the output is there.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.core.arrays import read_arrays
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import atomic_write, code_below, digest, stamp_of
from image_diffusion.core.together import gathered

Arrays = Mapping[str, NDArray[Any]]
"""What a batch of work gives, by name."""


@contextmanager
def going_on(output: Path, given: Any, inputs: Sequence[Path | None] = (), writes: bool = True) -> Iterator[None]:
    """Have `batches` keep what they make until what is done here is done, which writes `output`.

    given: plain data that decides the numbers, with the inputs: files, and folders of files, told by their stamps.
    writes: whether this process, of several that share the work, is the one that writes the output.
    """
    code = code_below(Path(__file__).parents[1])
    with_what = {"code": code, "torch": torch.__version__, "device": best_device().type}
    halfway = _Halfway(halfway_of(output), {"given": given, "inputs": _stamps(inputs), **with_what})
    token = _current.set(halfway)
    try:
        yield
    finally:
        _current.reset(token)
    found, asked = map(sum, zip(*gathered((halfway.found, halfway.asked)), strict=True))
    if writes:
        if found:
            print(f"{output.name}: {found:,} of {asked:,} batches of work were there from an earlier start", flush=True)
        shutil.rmtree(halfway.folder, ignore_errors=True)


def halfway_of(output: Path) -> Path:
    """Where lies what has been made of an output so far."""
    return output.with_name(f".{output.name}.halfway")


def batches(of: Any) -> Callable[[str, Callable[[], Arrays]], Arrays]:
    """What gives a batch of work by its name: made by a function, or what an earlier start has made.

    of: plain data that tells work from other work of the same stage; who asks with the same again gets that of the
    second time, and so on. Outside of `going_on` nothing is kept.
    """
    halfway = _current.get()
    return (lambda name, make: make()) if halfway is None else halfway.batches(of)


@dataclass
class _Halfway:
    """folder: of all. given: what decides the numbers. asked, found: batches, and those that were there."""

    folder: Path
    given: dict[str, Any]
    asked: int = 0
    found: int = 0
    _times: Counter[str] = field(default_factory=Counter)

    def batches(self, of: Any) -> Callable[[str, Callable[[], Arrays]], Arrays]:
        kind = digest([of, self.given])
        self._times[kind] += 1
        folder = self.folder / f"{kind}-{self._times[kind]}"

        def kept(name: str, make: Callable[[], Arrays]) -> Arrays:
            path = folder / f"{name}.npz"
            self.asked += 1
            with suppress(ValueError):  # there is none, or it is damaged
                arrays = {each: np.array(array) for each, array in read_arrays(path).items()}
                self.found += 1
                return arrays
            made = make()
            # A process that has done the same meanwhile may remove the folder.
            with suppress(FileNotFoundError), atomic_write(path) as file:
                np.savez(file, **made)  # type: ignore[arg-type]
            return made

        return kept


_current: ContextVar[_Halfway | None] = ContextVar("halfway", default=None)


def _stamps(paths: Sequence[Path | None]) -> dict[str, Any]:
    """The stamp of each file, and of those in each folder but hidden ones: notes of those who have read them."""
    found: dict[str, Any] = {}
    for path in paths:
        if path is not None and path.is_dir():
            found |= _stamps(sorted(path.glob("[!.]*")))
        elif path is not None and path.is_file():
            found[str(path)] = stamp_of(path)
    return found
