"""Work that is done before it is asked for: by a thread of its own, a little ahead of who takes it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def ahead(items: Generator[T, None, None], count: int, name: str) -> Iterator[Iterator[T]]:
    """The same items, which a thread makes while the last one is in use: at most `count` that nobody has taken yet,
    the one that is being made among them.

    What making them raises is raised where the next one is asked for. In the end, however that comes, no thread is
    left, and what makes them has ended: after the item that it is at. name: of the thread.
    """
    made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room, ended = threading.Semaphore(count), threading.Event()

    def make() -> None:
        try:
            with closing(items):
                while room.acquire() and not ended.is_set():
                    made.put((next(items),))
        except StopIteration:
            made.put(None)
        except BaseException as error:  # raised where the items are taken
            made.put(error)

    def taken() -> Iterator[T]:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item[0]

    thread = threading.Thread(target=make, daemon=True, name=name)
    thread.start()
    try:
        yield taken()
    finally:
        ended.set()
        room.release()
        thread.join()
