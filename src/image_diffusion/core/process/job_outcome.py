"""Outcomes of the attempts at a stage, in a note beside its log, since a queue knows an exit status at most.
`workflow/scripts/logged` adds a line for each attempt in a job of a queue, and only there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from image_diffusion.core.process.out_of_resources import is_of_host_memory, sentence_on

VARIABLE = "IMAGE_DIFFUSION_ATTEMPT"
"""The environment variable that names the note."""

Ending = Literal["stopped", "mistake", "memory", "accident"]
"""stopped: on request, and has saved. mistake: would end the same way again. memory: would succeed with more of it.
accident: of the machine, the network, the file system; and anything unforeseen."""


@dataclass(frozen=True)
class JobOutcome:
    """An attempt at a stage in a job of a queue."""

    job: str
    """The number of the job."""
    host: str
    """The machine that it ran on, or the first of them."""
    began: float
    """Start time, in seconds since 1970."""
    ending: Ending | None = None
    """Ending of the attempt; None for one that was killed, that still runs, or that succeeded."""
    said: str = ""
    """Its last line."""


def note(ending: Ending, said: str) -> None:
    """Record how this process ends. Of several processes, the first to end records the reason."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([ending, said]) + "\n")


def ending_of(error: Exception) -> Ending:
    """Classify an error. A disk or a GPU that is full is as full the next time."""
    if is_of_host_memory(error):
        return "memory"
    return "mistake" if isinstance(error, ValueError) or sentence_on(error) else "accident"


def read_attempts(path: Path) -> list[JobOutcome]:
    """Return the attempts that a note holds, the oldest first; empty where the note does not exist."""
    attempts: list[JobOutcome] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, IndexError):  # a line that was cut off, or of another version
                if not line.startswith("["):
                    job, host, began = line.split()
                    attempts.append(JobOutcome(job, host, float(began)))
                elif attempts[-1].ending is None:  # of several processes the first to end says why
                    ending, said = json.loads(line)
                    attempts[-1] = replace(attempts[-1], ending=ending, said=said)
    return attempts
