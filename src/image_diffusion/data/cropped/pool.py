"""Crop several shards at once, in processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized

from image_diffusion.core.process.parent_watch import end_with, mark
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.cropped.plan import Task
from image_diffusion.data.cropped.shard import ShardCropper
from image_diffusion.data.shards.records import ShardRecord
from image_diffusion.data.sources.base import Item

_POLL_S = 0.5  # between looks at the count of the pool
_done: Synchronized[int] | None = None  # in a process of the pool: how many items all of them have done


def crop_shards(
    cropper: ShardCropper,
    tasks: Sequence[Task],
    processes: int,
    progress: Progress,
    drops: Mapping[int, Set[str]] | None = None,
) -> Iterator[tuple[ShardRecord, bool]]:
    """Yield the record of each shard, in order, and True if the shard was written. One process crops if one is enough
    or no others can be started.

    drops: names of the images that each shard leaves out; None: shards that do not exist yet leave nothing out.
    """
    work = [(shard, items, None if drops is None else drops[shard]) for shard, items in tasks]
    started = _pool(min(processes, len(work)))
    if started is None:
        for shard, items, drop in work:
            yield cropper.write(shard, items, drop, progress.advance)
        return
    (pool, done), reported = started, 0
    with pool:
        futures = [pool.submit(_crop_shard, cropper, shard, items, drop) for shard, items, drop in work]
        try:
            for future in futures:
                while True:
                    wait([future], _POLL_S)
                    count = done.get_obj().value  # without its lock, which a process may have taken into its grave
                    progress.advance(count - reported)
                    reported = count
                    if future.done():
                        break
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pool(processes: int) -> tuple[ProcessPoolExecutor, Synchronized[int]] | None:
    """Start processes that crop, and a count of the items that all of them have done."""
    if processes <= 1:
        return None
    try:
        spawn = multiprocessing.get_context("spawn")
        done: Synchronized[int] = spawn.Value("q", 0)
        return ProcessPoolExecutor(processes, spawn, _initialize, (mark(), done)), done
    except OSError as error:  # what they share lies in /dev/shm
        reason = "several share memory in /dev/shm, which this machine does not give"
        print(f"crop: one process crops, since {reason}: {error}.", file=sys.stderr)
        return None


def _initialize(parent: str, done: Synchronized[int]) -> None:
    """Bind a process of the pool to the one that started it, and to the count of all of them."""
    global _done
    _done = done
    end_with(parent.split())


def _crop_shard(
    cropper: ShardCropper, shard: int, items: list[Item], drop: Set[str] | None
) -> tuple[ShardRecord, bool]:
    """Write a shard in a process of the pool, which counts with all others."""
    done = _done
    assert done is not None

    def count(items: int) -> None:
        with done.get_lock():
            done.value += items

    return cropper.write(shard, items, drop, count)
