"""GPUs of a machine without a queue: their list, and one for each stage that uses one.

    python -m image_diffusion.workflow.jobs.gpu_locks NUMBER COMMAND...

claims so many of those that IMAGE_DIFFUSION_DEVICES names, or else of all, waits where others have them, and becomes
the command, which is given its own alone in CUDA_VISIBLE_DEVICES.
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
"""The environment variable that names, to the stages that Snakemake starts, the devices which they share."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PAUSE_S, _PATIENCE_S = 0.2, 3.0


def devices_here(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine as CUDA_VISIBLE_DEVICES names them: its members where it is set, or else by
    number."""
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
    """Claim this number of these devices for this process alone, until it ends, and for the command it becomes; None if
    fewer are free, and then none is claimed.

    The lock is this process's own, as fcntl has them: it outlives exec, no child inherits it, and the system drops it
    with the process, however that ends. (Processes of a training that is killed save and end after it, and may compute
    for so long.) The files lie in the folder for temporary files, for all users of the machine.
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
    # Who clears away old temporary files leaves those with the sticky bit, as the XDG specification has it.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o1666)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # by either of these names another process has it
        os.close(lock)
        return None
    return lock


def main() -> None:
    """Wait for the devices and become the command. Raises ValueError for more than the machine has."""
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
