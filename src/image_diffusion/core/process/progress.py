"""Progress of a stage by tqdm: a bar on a terminal; in a log, a line every ten seconds, later every minute."""

from __future__ import annotations

import os
import re
import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

VARIABLE = "IMAGE_DIFFUSION_STAGE"
"""Environment variable with the name of the job, such as demo/train, if several jobs print to one terminal."""

_LINE = "{desc}: {n:,} of {total:,}{unit} ({percentage:.0f}%), {rate_noinv_fmt}, {remaining} left{postfix}"
_UNKNOWN = re.compile(r", \? \S+, \? left")  # before a rate is known
_EVERY_S, _AT_MOST_EVERY_S = 10.0, 60.0
_SHARE = 0.1  # share of the elapsed time between two lines


class Progress:
    """Progress of a loop: items done, their recent rate, the remaining time and an optional note. total: number of
    items. unit: name of an item, in the singular. initial: items done before this start. quiet: show nothing.
    """

    def __init__(self, title: str, total: int, unit: str, initial: int = 0, quiet: bool = False) -> None:
        log = None if sys.stderr.isatty() else _Lines(sys.stderr)
        self._started, self._in_log = time.monotonic(), log is not None
        self._bar = _Bar(
            desc=_whose(title),
            total=total,
            unit=f" {unit}s",
            initial=initial,
            dynamic_ncols=log is None,
            file=log,
            mininterval=0.1 if log is None else _EVERY_S,
            miniters=1,
            disable=quiet,
            bar_format=None if log is None else _LINE,
            position=None if log is None else 0,  # lines of nested bars also follow one another
        )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more items as done; `note` is shown after the numbers, e.g. the loss."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        if self._in_log:
            passed = time.monotonic() - self._started
            self._bar.mininterval = min(max(_EVERY_S, _SHARE * passed), max(_EVERY_S, _AT_MOST_EVERY_S))
        self._bar.update(count)

    def reach(self, count: int) -> None:
        """Advance the count to `count` items."""
        self.advance(max(0, count - int(self._bar.n)))

    def close(self) -> None:
        """Close the bar and show its final state."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bar(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
    monitor_interval = 0  # no monitoring thread: every update checks the clock


class _Lines:
    """Log file in which each state of the bar is a separate line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if text.strip():
            self._file.write(_UNKNOWN.sub("", " ".join(text.split())) + "\n")

    def flush(self) -> None:
        self._file.flush()


def _whose(title: str) -> str:
    """Return a title preceded by the name of its job: "demo/train", "demo/evaluate: features of samples"."""
    job = os.environ.get(VARIABLE, "")
    return title if not job else job if job.endswith(f"/{title}") else f"{job}: {title}"
