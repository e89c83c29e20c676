"""Prefetching in a thread: order of items, their limit, and the end of the thread."""

import threading
from collections.abc import Generator, Iterator

import pytest

from image_diffusion.data.shards.loader import prefetch

LIMIT_S = 10.0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "maker"]


def test_items_arrive_in_order_and_the_next_is_made_while_one_is_in_use() -> None:
    begun = [threading.Event() for _ in range(5)]

    def items() -> Generator[int, None, None]:
        for i, event in enumerate(begun):
            event.set()
            yield i

    found = []
    with prefetch(items(), 1, "maker") as made:
        for i in made:
            assert all(event.wait(LIMIT_S) for event in begun[: i + 2])
            found.append(i)
    assert found == [0, 1, 2, 3, 4] and not threads()


@pytest.mark.parametrize("count", [1, 3])
def test_prefetched_items_are_limited_to_the_count(count: int) -> None:
    asked, allowed = 0, []
    filled = threading.Event()

    def items() -> Generator[int, None, None]:
        for i in range(20):
            allowed.append(i < asked + count)
            if i + 1 == count:
                filled.set()
            yield i

    with prefetch(items(), count, "maker") as made:
        assert filled.wait(LIMIT_S)  # the count is reached before the first request
        for i in range(20):
            asked += 1
            assert next(made) == i
        assert next(made, None) is None
    assert allowed == [True] * 20


def test_an_error_is_raised_after_the_items_before_it() -> None:
    def items() -> Generator[int, None, None]:
        yield from range(3)
        raise ValueError("the fourth")

    found = []
    with pytest.raises(ValueError, match="the fourth"), prefetch(items(), 2, "maker") as made:
        for each in made:
            found.append(each)  # noqa: PERF402 - the error comes between
    assert found == [0, 1, 2] and not threads()


def test_worker_thread_ends_with_its_consumer() -> None:
    ended = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt), prefetch(items(), 2, "maker") as made:
        next(made)
        assert threads() == ["maker"]
        raise KeyboardInterrupt
    assert ended.is_set() and not threads()


def test_nested_prefetching_ends_with_its_consumer() -> None:
    """When the consumer fails, the second thread waits for the first; then both have ended."""
    slow = threading.Event()

    def first() -> Generator[int, None, None]:
        yield 1
        slow.wait(LIMIT_S)
        yield 2

    def second(items: Iterator[int]) -> Generator[int, None, None]:
        for each in items:
            yield 10 * each

    with (
        pytest.raises(OSError, match="full"),
        prefetch(first(), 1, "maker") as some,
        prefetch(second(some), 1, "maker") as all_,
    ):
        assert next(all_) == 10
        slow.set()
        raise OSError("full")
    assert not threads()
