"""How an attempt at a stage ended, in a note beside its log: a queue knows an exit status at most, and whether to send
a job again depends on more. `workflow/scripts/logged` begins the note in a job of a queue, and only there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from image_diffusion.core.exhausted import is_of_host_memory, sentence_on

VARIABLE = "IMAGE_DIFFUSION_ATTEMPT"
"""The environment variable that names the note."""

Ending = Literal["stopped", "mistake", "memory", "accident"]
"""stopped: told to, and has saved. mistake: would end so again. memory: with more of it, it would not. accident: of the
machine, the network, the file system; and what nobody has foreseen."""


@dataclass(frozen=True)
class Attempt:
    """job: its number in the queue. host: where it ran, or the first of its machines. ending: None for one that was
    killed. said: its last line."""

    job: str
    host: str
    ending: Ending | None = None
    said: str = ""


def note(ending: Ending, said: str) -> None:
    """Write down how this process ends. Of several processes the first to end tells why."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([ending, said]) + "\n")


def ending_of(error: Exception) -> Ending:
    """What an error is. A disk or a GPU that is full is as full the next time."""
    if is_of_host_memory(error):
        return "memory"
    return "mistake" if isinstance(error, ValueError) or sentence_on(error) else "accident"


def read_attempt(path: Path) -> Attempt | None:
    """What a note says; None where there is none."""
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        job, host = first.split()
    except (OSError, ValueError):
        return None
    try:
        ending, said = json.loads(rest[0])
    except (IndexError, ValueError):
        return Attempt(job, host)
    return Attempt(job, host, ending, said)
