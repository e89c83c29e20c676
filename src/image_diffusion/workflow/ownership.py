"""One Snakemake at a time in a folder and in its results; the same command goes on after any death of the last."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from image_diffusion.core.exhausted import sentence_on
from image_diffusion.workflow.queue import cancel_jobs


def take_over(folder: Path) -> TextIO:
    """Clear away what a killed Snakemake left in a folder: its locks, and its jobs in a Slurm queue.

    It is dead when the lock that the system drops with a process is free. One that ran on another machine may be alive:
    then its locks stay, and Snakemake says that the folder is locked and how to unlock it. Returns what holds our lock,
    until it is closed. Where that cannot be written, Snakemake ends with one clear line.
    """
    state = folder / ".snakemake"
    mine = _opened(state / "owner")
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return mine
    mine.seek(0)
    last_host = mine.read()
    left = list((state / "locks").glob("*"))
    if left and last_host not in ("", socket.gethostname()):
        return mine
    if left:
        cancel_jobs(folder)
        for lock in left:
            lock.unlink()
    mine.truncate(0)
    mine.write(socket.gethostname())
    mine.flush()
    return mine


def hold(results: Path) -> TextIO:
    """Have a folder of results to ourselves until we end, whatever other folder another Snakemake was started in. Of
    two in one folder Snakemake's own locks keep the files apart, so that a checkpoint is sampled beside its training.

    Where another one works in it, or it cannot be written, Snakemake ends with one clear line. On a file system without
    locks everybody may.
    """
    mine = _opened(results / ".owner")
    with suppress(OSError):
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine.seek(0)
            other = mine.read()
            if other.endswith(_here()):
                return mine
            raise SystemExit(
                f"error: Another Snakemake works in {results}: {other or 'it has just begun'}. Wait until it has "
                "ended, or set `results` in config/config.yaml to a folder of its own."
            ) from None
    mine.truncate(0)
    mine.write(f"process {os.getpid()}{_here()}")
    mine.flush()
    return mine


def _here() -> str:
    return f" on {socket.gethostname()}, started in {Path.cwd()}"


def _opened(path: Path) -> TextIO:
    """A file that is made where it is missing, with its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        advice = "Make it writable" if isinstance(error, PermissionError) else "Remove it"
        told = sentence_on(error) or f"{error.filename} cannot be written: {error.strerror}. {advice} and start again."
        raise SystemExit(f"error: {told}") from None
