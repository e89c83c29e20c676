"""Outcomes of the attempts at a stage, in a file next to its log, since a queue reports only an exit status.
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
"""stopped: stopped on request after saving. mistake: would fail again. memory: would succeed with more memory.
accident: failure of the machine, network or file system, or any unexpected error."""


@dataclass(frozen=True)
class JobOutcome:
    """An attempt at a stage in a job of a queue."""

    job: str
    """Number of the job."""
    host: str
    """Machine of the job, or the first of several."""
    began: float
    """Start time, in seconds since 1970."""
    ending: Ending | None = None
    """Ending of the attempt; None if it was killed, is running, or succeeded."""
    said: str = ""
    """Message of its ending."""


def note(ending: Ending, said: str) -> None:
    """Record the ending of this process. Of several processes, the first that ends gives the reason."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([ending, said]) + "\n")


def ending_of(error: Exception) -> Ending:
    """Classify an error. A full disk or GPU is a mistake, since it would be full again."""
    if is_of_host_memory(error):
        return "memory"
    return "mistake" if isinstance(error, ValueError) or sentence_on(error) else "accident"


def read_attempts(path: Path) -> list[JobOutcome]:
    """Return the attempts in a note, the oldest first; empty if the note does not exist."""
    attempts: list[JobOutcome] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, IndexError):  # a truncated line, or a line of another version
                if not line.startswith("["):
                    job, host, began = line.split()
                    attempts.append(JobOutcome(job, host, float(began)))
                elif attempts[-1].ending is None:  # the first process that ends gives the reason
                    ending, said = json.loads(line)
                    attempts[-1] = replace(attempts[-1], ending=ending, said=said)
    return attempts
