"""How far a stage is: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Counts items done, with the rate, the time left and an optional note.

    total: number of items. unit: what is counted, in the singular. initial: how many were done before this start.
    """

    def __init__(self, title: str, total: int, unit: str, initial: int = 0, line_every_s: float = 10.0) -> None:
        self._title, self._total, self._unit, self._initial = title, total, unit, initial
        self._done, self._started, self._line_every_s = initial, time.monotonic(), line_every_s
        self._printed = self._started
        self._bar = (
            tqdm(desc=title, total=total, unit=f" {unit}", initial=initial, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more items as done; `note` is shown behind the numbers, e.g. the loss."""
        self._done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._printed >= self._line_every_s:
            self._line(note)

    def close(self) -> None:
        """End the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line("")

    def _line(self, note: str) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        rate = (self._done - self._initial) / elapsed if elapsed > 0 else 0.0
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 and self._done < self._total else ""
        behind = f", {note}" if note else ""
        print(
            f"{self._title}: {self._done:,} of {self._total:,} {self._unit}s, {rate:.1f} a second{left}{behind}",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
