"""Ending early and in order: a signal or the clock asks, all processes agree on the step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from image_diffusion.training.parallel.world import World

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class _Interrupted(BaseException):
    pass


class Stop:
    """Decide when to stop. A context: inside it SIGTERM, SIGINT and SIGUSR1 only set a flag.

    A second signal ends the process at once, except under torchrun, which repeats signals of its own accord and has its
    own time limit. max_hours and save_every_s, seconds from one checkpoint to the next, are measured on a clock that
    nobody can set. saves: True if all processes save now, since that clock asked; set by `poll`.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str:
        """Return the reason for which this process was asked to stop."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return "train.max_hours" if self._is_requested() else "another process"

    def poll(self) -> bool:
        """Return True if all processes stop now; every process gets the same answer, and asks once a step.

        The answer is to the question of the step before, so that no process waits for it.
        """
        if self._world.size == 1:
            return self._take(self._question())
        answer = self._take(self._handle())
        self._flag.fill_(self._question())
        self._asked = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        return answer

    def close(self) -> None:
        """Take in the answer that is still on its way."""
        self._handle()

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """Do something that may be given up half-way: None when it was, because this process was asked to stop."""
        try:
            try:
                self._interrupts = True
                return None if self._is_requested() else work()
            finally:
                self._interrupts = False
        except _Interrupted:
            return None

    def _question(self) -> int:
        """Encode the wish of this process: 1 to save, 2 to stop, which saves as well. The largest of all counts."""
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
