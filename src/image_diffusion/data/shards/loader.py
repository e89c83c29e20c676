"""Prefetch batches of a rank in one thread. Gathering costs less than a transfer from a worker process would."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.data.shards.order import Balanced, Shuffled, share
from image_diffusion.data.shards.reader import Shards


@dataclass(frozen=True)
class Examples:
    """Samples as the shards hold them.

    stored: [B, *shape]. label: int64 [B], 0 without classes. epoch: int64 [B], pass over the data, or over the sample's
    class if classes are balanced. sample: int64 [B], the sample's number in its split; sample and epoch seed all its
    random numbers. joined_sets: the entries of the samples in each joined set, [B, …].
    """

    stored: Tensor
    label: Tensor
    epoch: Tensor
    sample: Tensor
    joined_sets: tuple[Tensor, ...] = ()

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Return the tensors of all fields, in order."""
        return self.stored, self.label, self.epoch, self.sample, *self.joined_sets

    @classmethod
    def from_columns(cls, columns: Sequence[Tensor]) -> Examples:
        """Rebuild examples from their `columns`."""
        stored, label, epoch, sample, *joined_sets = columns
        return cls(stored, label, epoch, sample, tuple(joined_sets))

    def split(self, size: int) -> list[Examples]:
        """Split examples into parts of at most `size` each, in their order."""
        columns = (torch.split(column, size) for column in self.columns)
        return [Examples.from_columns(parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Batches:
    """A rank's share of every global batch, endless or for a number of epochs.

    dataset: the shards to read. global_batch: examples per step on all ranks together. seed: of the run; decides order
    and flips. rank, world_size: as in torch.distributed. start: number of examples that all ranks have consumed.
    flip_probability: probability that an example is mirrored. prefetch: number of batches to read ahead. device: device
    of the examples, reached through reused page-locked memory if it is a GPU. epochs: number of passes; the last batch
    may be smaller than the others, even empty on some ranks, but all ranks see the same number of batches.
    balance_classes: whether all classes are equally frequent; a pass has the same number of examples either way.
    """

    dataset: Shards
    global_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    flip_probability: float = 0.0
    prefetch: int = 3
    device: torch.device | None = None
    epochs: int | None = None
    balance_classes: bool = False

    def __post_init__(self) -> None:
        if self.dataset.num_samples == 0:
            raise ValueError("The split holds no samples. Add images, or change data.validation_fraction.")
        if self.global_batch < 1:
            raise ValueError(f"The global batch must be at least 1; got {self.global_batch}.")

    def __iter__(self) -> Iterator[Examples]:
        """Yield this rank's examples of each step from `start` on."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        staging = _Staging(self.device, self.prefetch + 1) if on_gpu and self.device is not None else None
        with prefetch(self._in_order(staging), self.prefetch, "batches") as read:
            for item in read:
                yield staging.take(item) if staging is not None else item

    def _in_order(self, staging: _Staging | None) -> Generator[Any, None, None]:
        order: Balanced | Shuffled = (
            Balanced(self.dataset.labels, self.seed)
            if self.balance_classes
            else Shuffled(self.dataset.num_samples, self.seed)
        )
        position = self.start
        last = None if self.epochs is None else self.epochs * self.dataset.num_samples
        while last is None or position < last:
            end = position + self.global_batch if last is None else min(position + self.global_batch, last)
            yield self._read(order, position, end, staging)
            position = end

    def _read(self, order: Balanced | Shuffled, start: int, stop: int, staging: _Staging | None) -> Any:
        mine = share(start, stop, self.rank, self.world_size)
        samples, epochs = order.at(*mine)
        sample, epoch = torch.from_numpy(samples), torch.from_numpy(epochs)
        flip = None
        if self.flip_probability > 0 and len(samples):
            flip = mirrored(Streams(self.seed, epoch, sample), self.flip_probability).numpy()
        label = torch.from_numpy(self.dataset.labels[samples])
        joined_sets = self.dataset.gather_joined(samples, flip)
        if staging is not None:
            return staging.put(self.dataset, samples, flip, (label, epoch, sample, *joined_sets))
        examples = Examples(self.dataset.gather(samples, flip), label, epoch, sample, joined_sets)
        if self.device is None or self.device.type == "cpu":
            return examples
        return Examples.from_columns([column.to(self.device) for column in examples.columns])


def mirrored(streams: Streams, probability: float) -> Tensor:
    """Return which of the samples are mirrored, bool [B]."""
    return streams.event("flip", probability)


class _Staging:
    """Transfer to a GPU: a ring of page-locked buffers, copied on a separate stream while the GPU computes."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth, self._turn = device, depth, 0
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []

    def put(self, dataset: Shards, samples: Any, flip: Any, columns: tuple[Tensor, ...]) -> Any:
        """Gather into the next buffer and start its copy; returns the argument of `take`."""
        turn = self._turn % self._depth
        self._turn += 1
        if turn == len(self._buffers):
            buffer = torch.empty((len(samples) + 1, *dataset.shape), dtype=dataset.dtype, pin_memory=True)
            self._buffers.append((buffer, torch.cuda.Event()))
        buffer, copied = self._buffers[turn]
        # The copy of this buffer's previous content must have finished; with prefetch + 1 buffers it nearly always has.
        copied.synchronize()
        if len(buffer) < len(samples):
            buffer = torch.empty((len(samples), *dataset.shape), dtype=dataset.dtype, pin_memory=True)
            self._buffers[turn] = (buffer, copied)
        stored = dataset.gather(samples, flip, out=buffer)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # the default device of a thread is 0
            moved = [tensor.to(self._device, non_blocking=True) for tensor in (stored, *columns)]
            copied.record(self._stream)
        return moved, copied

    def take(self, item: Any) -> Examples:
        """Return the examples on the GPU without waiting; the caller's stream waits for the copy."""
        moved, copied = item
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        # Allocated on the copying stream: without this its memory could be reused while the caller still reads it.
        for tensor in moved:
            tensor.record_stream(current)
        return Examples.from_columns(moved)


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
