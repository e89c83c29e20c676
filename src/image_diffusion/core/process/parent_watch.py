"""End a process together with the process that started it. After SIGKILL of Snakemake alone, its jobs would continue,
and write into the results of the next start."""

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
"""Environment variable by which a process names to its child processes the processes with which they end."""

GRACE_S = 90
"""Seconds that a process has to save and end before it is killed."""


def end_with_parent(environment: MutableMapping[str, str], queued: bool = False) -> None:
    """Make processes started with this environment end with this process, and with those already named in it. queued:
    True if this process is a job of a queue, which outlives the processes named, since they only submitted it.
    """
    named = None if queued else environment.get(VARIABLE)
    environment[VARIABLE] = " ".join(filter(None, [named, process_identifier()]))


def end_with(marks: Sequence[str]) -> None:
    """Send this process SIGTERM when one of these processes has ended, and SIGKILL if it does not end. Processes of
    other machines are ignored: a job of a queue does not depend on the process that submitted it.
    """
    watched = [mark for mark in marks if mark.split(":")[0] == _machine()]
    if watched:
        threading.Thread(target=_wait, args=(watched,), daemon=True, name="lifeline").start()


def process_identifier() -> str:
    """Return an identifier of this process that is unique over all machines; empty on a system without /proc."""
    machine = _machine()
    return f"{machine}:{os.getpid()}:{_started(os.getpid())}" if machine else ""


def _descriptor_of(mark: str) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None when it has ended. mark: its identifier."""
    _, pid, started = mark.split(":")
    try:
        descriptor = os.pidfd_open(int(pid))
    except OSError:
        return None
    if _started(int(pid)) == started:
        return descriptor
    os.close(descriptor)  # the number was reused by another process
    return None


def _wait(watched: list[str]) -> None:
    descriptors = [descriptor for mark in watched if (descriptor := _descriptor_of(mark)) is not None]
    if len(descriptors) == len(watched):
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll()
    with suppress(OSError):  # its reader may have ended
        log_line("stopped: the parent process has exited.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _machine() -> str:
    """Return an identifier of this boot of the machine and of the PID namespace; empty on a system without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time of a process, in clock ticks; empty if no process has that number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
