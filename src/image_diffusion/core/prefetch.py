"""Prefetch items in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def prefetch(items: Generator[T, None, None], count: int, name: str) -> Iterator[Iterator[T]]:
    """Prefetch items of a generator in a thread while the last one is in use: at most `count` items that are not yet
    taken, including the one in progress.

    Exceptions of the generator are raised where the next item is requested. When the context ends, for any reason, the
    generator ends after its current item, and the thread with it. name: name of the thread.
    """
    ready: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room, ended = threading.Semaphore(count), threading.Event()

    def produce() -> None:
        try:
            with closing(items):
                while room.acquire() and not ended.is_set():
                    ready.put((next(items),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:  # raised at the next item
            ready.put(error)

    def consume() -> Iterator[T]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item[0]

    thread = threading.Thread(target=produce, daemon=True, name=name)
    thread.start()
    try:
        yield consume()
    finally:
        ended.set()
        room.release()
        thread.join()
