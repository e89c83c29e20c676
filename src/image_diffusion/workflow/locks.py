"""Allow one Snakemake at a time in a folder and in its results; after a crash, the same command resumes."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from image_diffusion.core.process.out_of_resources import sentence_on
from image_diffusion.workflow.jobs.slurm_queue import is_in_queue


@dataclass(frozen=True)
class Owner:
    """Owner of a folder. is_ours: True if this process works in it, and no other."""

    file: TextIO
    is_ours: bool


def take_over(folder: Path) -> Owner:
    """Remove the locks that a killed Snakemake left in a folder. Its queued jobs are handled by the code that submits
    jobs.

    A Snakemake has ended if its file lock, which the system releases with the process, is free. On another machine it
    may still run, unless it was a Slurm job that has ended; if it may, its locks are kept, and Snakemake reports that
    the folder is locked and how to unlock it. Returns the owner of the lock, which lasts until its file is closed. If
    the file cannot be written, Snakemake exits with a one-line error.
    """
    state = folder / ".snakemake"
    mine = _opened(state / "owner")
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return Owner(mine, False)
    mine.seek(0)
    last_host, _, last_job = mine.read().partition(" ")
    left = list((state / "locks").glob("*"))
    if left and last_host not in ("", socket.gethostname()) and (not last_job or is_in_queue(last_job)):
        return Owner(mine, False)
    for lock in left:
        lock.unlink()
    mine.truncate(0)
    mine.write(" ".join(filter(None, [socket.gethostname(), os.environ.get("SLURM_JOB_ID")])))
    mine.flush()
    return Owner(mine, True)


def lock_results(results: Path) -> TextIO:
    """Lock a folder of results until this process ends, against Snakemakes started in other folders. Those started in
    the same folder share the lock, since Snakemake's own locks separate their files, so that a checkpoint can be
    sampled during training.

    Call it before anything is written there. If another Snakemake holds the lock, or the folder cannot be written,
    Snakemake exits with a one-line error. On a file system without locks, nobody is refused.
    """
    mine = _opened(results / ".owner")
    with suppress(OSError):
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine.seek(0)
            other = mine.read()
            if other.endswith(_this_process()):
                fcntl.flock(mine, fcntl.LOCK_SH)
                return mine
            raise SystemExit(
                f"error: Another Snakemake works in {results}: {other or 'it has just begun'}. Wait until it has "
                "ended, or set `results` in config/config.yaml to a folder of its own."
            ) from None
    mine.truncate(0)
    mine.write(f"process {os.getpid()}{_this_process()}")
    mine.flush()
    with suppress(OSError):
        fcntl.flock(mine, fcntl.LOCK_SH)
    return mine


def _this_process() -> str:
    return f" on {socket.gethostname()}, started in {Path.cwd()}"


def _opened(path: Path) -> TextIO:
    """Open a file, creating it and its folder if missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        links = (link for link in (path, *path.parents) if link.is_symlink() and not link.exists())
        if link := next(links, None):
            raise SystemExit(
                f"error: {link} is a link to {link.readlink()}, which is missing. Mount its disk, or make that folder."
            ) from None
        advice = "Remove it and start again"
        if isinstance(error, PermissionError):
            advice = "Make it writable and start again"
        elif isinstance(error, FileNotFoundError):  # a folder of virtual files, such as /proc
            advice = "Name another folder"
        message = sentence_on(error) or f"{error.filename} cannot be written: {error.strerror}. {advice}."
        raise SystemExit(f"error: {message}") from None
