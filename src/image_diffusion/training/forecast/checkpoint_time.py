"""Time that a checkpoint takes on a disk, to check that a training that is asked to end has the time to save."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from image_diffusion.core.files.atomic import sha256_file

_PROBE = 256 << 20
_BLOCK = 8 << 20


def seconds_to_save(size: int, folder: Path) -> float:
    """Return the seconds that a checkpoint of a number of bytes takes in a folder, which may not exist yet: written, on
    the disk, and hashed, as `training.checkpoint` does it. Up to 256 MiB are written and removed. Raises OSError."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    probe = max(_BLOCK, min(size, _PROBE))
    block = os.urandom(_BLOCK)  # what a file system could not make smaller
    with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-") as file:
        started = time.perf_counter()
        for _ in range(0, probe, _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        sha256_file(Path(file.name))
        return (time.perf_counter() - started) * size / (-(-probe // _BLOCK) * _BLOCK)


def told_too_late(save_s: float, grace_s: float) -> str | None:
    """Return advice if saving takes longer than the time between Slurm's signal and the end; None otherwise."""
    if save_s <= grace_s:
        return None
    lead = -(-round(2 * save_s + 30) // 60) * 60
    return (
        f"A checkpoint takes {save_s:.0f} s to save, and a time limit leaves {grace_s:.0f}: steps since the one before "
        f'would be lost. Let Slurm say so earlier, in config.yaml: slurm: {{stages: {{train: {{slurm_extra: "--signal='
        f'TERM@{lead}"}}}}}}.'
    )
