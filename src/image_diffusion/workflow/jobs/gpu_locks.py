"""GPUs of a machine without a queue: list them, and reserve one for each stage that uses one.

    python -m image_diffusion.workflow.jobs.gpu_locks NUMBER COMMAND...

claims that number of the GPUs in IMAGE_DIFFUSION_DEVICES (unset: of all GPUs), waits while other processes hold them,
and executes the command with the claimed GPUs in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from image_diffusion.core.process import command
from image_diffusion.core.process.errors import log_line

VARIABLE = "IMAGE_DIFFUSION_DEVICES"
"""Environment variable with the devices that the stages started by Snakemake share."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PAUSE_S, _PATIENCE_S = 0.2, 3.0


def devices_here(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine as in CUDA_VISIBLE_DEVICES: its entries if it is set, else all GPUs by number."""
    if (visible := environment.get(_VISIBLE)) is not None:
        members = (member.strip() for member in visible.split(","))
        return tuple(dict.fromkeys(takewhile(lambda member: member not in ("", "-1"), members)))
    if (lists := shutil.which("nvidia-smi", path=environment.get("PATH"))) is None:
        return ()
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run([lists, "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
        return tuple(map(str, range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))))
    return ()


def claim(devices: Sequence[str], number: int) -> list[str] | None:
    """Claim a number of devices exclusively for this process and the command that replaces it, until it ends; return
    None and claim none if fewer are free.

    An fcntl lock belongs to this process: it persists across exec, no child inherits it, and the system releases it
    when the process ends. (Even then, the worker processes of a killed training may use the GPUs until they have
    saved and exited.) The lock files are in the folder for temporary files, shared by all users of the machine.
    """
    folder = Path(tempfile.gettempdir(), "image-diffusion-devices")
    mine: dict[str, int] = {}
    umask = os.umask(0)
    try:
        folder.mkdir(exist_ok=True)
        for device in devices:
            if len(mine) < number and (lock := _locked(folder / device.replace("/", "-"))) is not None:
                mine[device] = lock
    finally:
        os.umask(umask)
    if len(mine) == number:
        for lock in mine.values():
            os.set_inheritable(lock, True)
        return list(mine)
    for lock in mine.values():
        os.close(lock)
    return None


def _locked(path: Path) -> int | None:
    # Cleaners of old temporary files keep files with the sticky bit (XDG specification).
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o1666)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # both mean that another process holds it
        os.close(lock)
        return None
    return lock


def main() -> None:
    """Wait for the devices and execute the command. Raises ValueError for more devices than the machine has."""
    number, line = int(sys.argv[1]), sys.argv[2:]
    devices = devices_here({**os.environ, _VISIBLE: named} if (named := os.environ.get(VARIABLE)) else os.environ)
    if number > len(devices):
        raise ValueError(f"{number} GPUs are asked for, and there are {len(devices)}: {', '.join(devices) or 'none'}.")
    began, announced = time.monotonic(), False
    while (mine := claim(devices, number)) is None:
        if not announced and time.monotonic() - began > _PATIENCE_S:
            log_line(f"Waiting for {number} free GPU{'s' * (number > 1)}: other stages use {', '.join(devices)}.")
            announced = True
        time.sleep(_PAUSE_S)
    os.execvpe(line[0], line, os.environ | {_VISIBLE: ",".join(mine)})


if __name__ == "__main__":
    command.run(main)
