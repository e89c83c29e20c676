"""Graceful stop: on a signal or a time limit, all processes agree on the step at which they save and stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from image_diffusion.training.parallel.world import World

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class _Interrupted(BaseException):
    pass


class Stop:
    """Context manager that decides when to stop. Inside it, SIGTERM, SIGINT and SIGUSR1 only set a flag.

    A second signal ends the process at once, except under torchrun, which repeats signals and has its own time limit.
    max_hours and save_every_s, seconds between checkpoints, are measured by a monotonic clock. saves: True if all
    processes are to save now, because of the time or to stop; set by `poll`.
    """

    def __init__(self, world: World, max_hours: float | None, save_every_s: float | None = None) -> None:
        self._world, self._save_every_s = world, save_every_s
        self._saved_at, self.saves = time.monotonic(), False
        self._until = time.monotonic() + 3600.0 * max_hours if max_hours is not None else None
        self._repeats = "TORCHELASTIC_RUN_ID" in os.environ
        self._signal: int | None = None
        self._interrupts = False
        self._asked: Any = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str:
        """Return the reason for which this process was asked to stop."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return "train.max_hours" if self._is_requested() else "another process"

    def poll(self) -> bool:
        """Return True if all processes stop now. Every process calls it once a step and gets the same answer.

        The answer belongs to the call of the previous step, so that no process waits for it.
        """
        if self._world.size == 1:
            return self._take(self._question())
        answer = self._take(self._handle())
        self._flag.fill_(self._question())
        self._asked = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        return answer

    def close(self) -> None:
        """Wait for the communication that is still in progress."""
        self._handle()

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """Do work that a request to stop interrupts. Returns its result, or None if it was interrupted."""
        try:
            try:
                self._interrupts = True
                return None if self._is_requested() else work()
            finally:
                self._interrupts = False
        except _Interrupted:
            return None

    def _question(self) -> int:
        """Return this process's request: 1 to save, 2 to stop and save, 0 for none. The largest of all processes
        applies."""
        due = self._save_every_s is not None and time.monotonic() >= self._saved_at + self._save_every_s
        return 2 if self._is_requested() else int(due)

    def _take(self, answer: int) -> bool:
        self.saves = answer > 0
        if self.saves:
            self._saved_at = time.monotonic()
        return answer == 2

    def _handle(self) -> int:
        if self._asked is None:
            return 0
        self._asked.wait()
        self._asked = None
        return int(self._flag.item())

    def _is_requested(self) -> bool:
        return self._signal is not None or (self._until is not None and time.monotonic() >= self._until)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and not self._repeats:
            os._exit(128 + number)
        self._signal = number
        if self._interrupts:
            self._interrupts = False
            raise _Interrupted
