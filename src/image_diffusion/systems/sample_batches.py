"""Samples in batches: making them, dividing them into parts of several jobs, and joining the parts. Finished batches
are stored (`core.files.partial_results`), so that the same command resumes after an interruption.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import remove_unfinished
from image_diffusion.core.files.image_arrays import read_arrays, stream_samples
from image_diffusion.core.files.partial_results import Arrays, batches, rows_of_part
from image_diffusion.core.process.progress import Progress
from image_diffusion.systems.base import Model
from image_diffusion.systems.sampling import Maker, SampleSettings

_PART = re.compile(r"\.?(?P<name>part-\d+-of-(?P<count>\d+)\.npz)(?P<unfinished>\..+\.tmp|\.halfway)?")


def write_part(
    title: str,
    one: str,
    maker: Maker,
    settings: SampleSettings,
    output: Path,
    part: tuple[int, int] = (0, 1),
    labels: Tensor | None = None,
) -> int:
    """Write the samples of part i of n, (i, n), as an .npz, and return their number.

    title, one: title of the progress, and name of one sample in it. labels: of the samples, written with them.
    """
    rows = rows_of_part(settings.num_samples, settings.batch_size, part)
    count: int = sum(batch.stop - batch.start for batch in rows)
    with Progress(title, count, one) as progress:
        stream_samples(output, with_progress(cached_batches(maker, rows), progress), count, labels)
    return count


def remove_stale_parts(output: Path, part: tuple[int, int] | None, joined_parts: Sequence[Path]) -> None:
    """Remove complete and incomplete parts that killed runs left next to an output: those of another number of parts,
    and when parts are joined all except `joined_parts`. Files that are being written are kept."""
    names = {path.name for path in joined_parts}
    for path in sorted(output.parent.glob("*part-*-of-*.npz*")):
        match = _PART.fullmatch(path.name)
        if match is None or (part is not None and int(match["count"]) == part[1]):
            continue
        if match["unfinished"] == ".halfway":
            shutil.rmtree(path, ignore_errors=True)
        elif match["unfinished"]:
            remove_unfinished(output.parent, glob.escape(match["name"]))
        elif path.name not in names:
            path.unlink(missing_ok=True)


def cached_batches(maker: Maker, rows: Iterable[slice]) -> Iterator[Tensor]:
    """Yield the batches of these rows; those that an interrupted command finished are read from disk."""

    def generate(chosen: slice) -> Arrays:
        return {"samples": maker(chosen).numpy()}

    cached = batches("samples")
    for chosen in rows:
        yield torch.from_numpy(cached(f"{chosen.start}-{chosen.stop}", partial(generate, chosen))["samples"])


def joined(parts: list[Path], settings: SampleSettings) -> Iterator[Tensor]:
    """Yield the batches [B, C, H, W] or [B, dim] that the parts wrote, in order. A damaged part is removed, to be made
    again. Raises ValueError when a part is damaged, or the number of samples is wrong.
    """
    arrays = []
    for path in parts:
        try:
            arrays.append(read_arrays(path)["arr_0"])
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{error} It is removed: run the same command again.") from None
    if sum(map(len, arrays)) != settings.num_samples:
        raise ValueError(
            f"--made holds {sum(map(len, arrays)):,} samples, but sample.num_samples is {settings.num_samples:,}. Name "
            f"what every part wrote, once and in order."
        )
    for rows in arrays:
        for start in range(0, len(rows), settings.batch_size):
            yield torch.from_numpy(rows[start : start + settings.batch_size].copy()).movedim(-1, 1)


def first(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    """Yield at most `count` samples, keeping batch boundaries."""
    for batch in batches:
        yield batch[:count]
        count -= len(batch)
        if count <= 0:
            return


def with_progress(batches: Iterable[Tensor], progress: Progress) -> Iterator[Tensor]:
    """Yield the batches, and count them in the progress."""
    for batch in batches:
        yield batch
        progress.advance(len(batch))


def protocol(settings: Any, model: Model) -> dict[str, Any]:
    """Return the description of how samples are made, which metrics.json repeats."""
    return {
        "kind": "samples",
        "num_samples": settings.num_samples,
        "settings": dump(settings),
        "classes": model.classes,
        "weights_sha256": model.sha256,
        "step": model.step,
        "examples_seen": model.examples_seen,
    }
