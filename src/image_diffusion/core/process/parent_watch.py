"""End a process with the one that it works for. SIGKILL of Snakemake alone reaches none of its jobs: they would
continue, and write into the results of whatever is started next."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from image_diffusion.core.process.errors import log_line

VARIABLE = "IMAGE_DIFFUSION_ENDS_WITH"
"""The environment variable that names, to what a process starts, the processes to end with."""

GRACE_S = 90
"""Seconds that a process has to save and end before it is killed."""


def announce(environment: MutableMapping[str, str], queued: bool = False) -> None:
    """Have processes that are started with this environment end with this process, as well as with those already named
    in it.

    queued: this process is a job of a queue. Those named are then the ones that have sent it: it outlives them.
    """
    named = None if queued else environment.get(VARIABLE)
    environment[VARIABLE] = " ".join(filter(None, [named, mark()]))


def end_with(marks: Sequence[str]) -> None:
    """Send this process SIGTERM when one of these processes is gone, and SIGKILL if that does not help.

    Those of other machines are ignored: a job in a queue does not depend on who has sent it.
    """
    watched = [parent for parent in map(_Mark, marks) if parent.machine == _machine()]
    if watched:
        threading.Thread(target=_wait, args=(watched,), daemon=True, name="lifeline").start()


def mark() -> str:
    """Return a name of this process that is unique on all machines; empty on a system without /proc."""
    machine = _machine()
    return f"{machine}:{os.getpid()}:{_started(os.getpid())}" if machine else ""


class _Mark:
    """A mark taken apart."""

    def __init__(self, text: str) -> None:
        self.machine, pid, self.started = text.split(":")
        self.pid = int(pid)

    def open(self) -> int | None:
        """Return a descriptor that becomes readable when the process ends; None when it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        if _started(self.pid) == self.started:
            return descriptor
        os.close(descriptor)  # the number is another process's by now
        return None


def _wait(watched: list[_Mark]) -> None:
    descriptors = [descriptor for parent in watched if (descriptor := parent.open()) is not None]
    if len(descriptors) == len(watched):
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll()
    with suppress(OSError):  # nobody may be left to read it
        log_line("stopped: the parent process has exited.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _machine() -> str:
    """Return an identifier of this start of this machine, and of the visible numbering of processes; empty where the
    system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time of a process, in the system's own ticks; empty when no process has that number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
