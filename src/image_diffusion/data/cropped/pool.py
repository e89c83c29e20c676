"""Crop several shards in parallel processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized

from image_diffusion.core.process.parent_watch import end_with, process_identifier
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.cropped.plan import Task
from image_diffusion.data.cropped.shard import ShardCropper
from image_diffusion.data.shards.records import ShardRecord
from image_diffusion.data.sources.base import Item

_POLL_S = 0.5  # between reads of the pool's count
_done: Synchronized[int] | None = None  # in a process of the pool: number of items that all processes have done


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
                    count = done.get_obj().value  # without its lock, which a killed process may hold forever
                    progress.advance(count - reported)
                    reported = count
                    if future.done():
                        break
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pool(processes: int) -> tuple[ProcessPoolExecutor, Synchronized[int]] | None:
    """Start the processes that crop, with a shared count of the items that they have done."""
    if processes <= 1:
        return None
    try:
        spawn = multiprocessing.get_context("spawn")
        done: Synchronized[int] = spawn.Value("q", 0)
        return ProcessPoolExecutor(processes, spawn, _initialize, (process_identifier(), done)), done
    except OSError as error:  # shared memory is in /dev/shm
        reason = "several share memory in /dev/shm, which this machine does not give"
        print(f"crop: one process crops, since {reason}: {error}.", file=sys.stderr)
        return None


def _initialize(parent: str, done: Synchronized[int]) -> None:
    """Set up a process of the pool: end it with its parent process, and share the pool's count."""
    global _done
    _done = done
    end_with(parent.split())


def _crop_shard(
    cropper: ShardCropper, shard: int, items: list[Item], drop: Set[str] | None
) -> tuple[ShardRecord, bool]:
    """Write a shard in a process of the pool and add its items to the shared count."""
    done = _done
    assert done is not None

    def count(items: int) -> None:
        with done.get_lock():
            done.value += items

    return cropper.write(shard, items, drop, count)
