"""One checkpoint: a folder of tensors and plain data that is whole or absent, and says so of every byte.

step-0001000/checkpoint.json    step, examples seen, what the run is, sha256 and size of every other file
step-0001000/<group>.safetensors    network, each average, optimizer, objective, meter
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from image_diffusion.core.exhausted import writing
from image_diffusion.core.files import digest, read_json, sha256_file, sync_folder, write_json

FORMAT = 1


class Damaged(Exception):  # noqa: N818 - not told to people as it is: the reader falls back to an older checkpoint
    """A checkpoint that is not, byte for byte, what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if it had not been interrupted.

    step: updates done. examples_seen: examples they took, which is also the position in the data. reports_due: whether
    validation and sample grid of this step are still to be made. groups: tensors by file and name. extra: plain data.
    attempts: the ids of those that have led here, in the journal, and how many records each had written by then.
    """

    step: int
    examples_seen: int
    reports_due: bool
    groups: dict[str, dict[str, Tensor]]
    extra: dict[str, Any] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)


def folder_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:07d}"


def write_checkpoint(
    parent: Path,
    checkpoint: Checkpoint,
    identity: dict[str, Any],
    environment: dict[str, str],
    permit: Callable[[], None],
) -> Path:
    """Write a checkpoint beside the others, on disk when this returns. permit: raises if it may not appear.

    identity: plain data that tells this run from every other. Raises OSError, leaving nothing behind, when it cannot
    be written.
    """
    target = parent / folder_name(checkpoint.step)
    temporary = parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        sums = {}
        with ThreadPoolExecutor(1) as hashing:  # each file while the next is written
            for group, tensors in checkpoint.groups.items():
                path = temporary / f"{group}.safetensors"
                _save(path, tensors)
                sums[path] = hashing.submit(sha256_file, path)
        files = {path.name: {"sha256": each.result(), "bytes": path.stat().st_size} for path, each in sums.items()}
        record = {
            "format": FORMAT,
            "step": checkpoint.step,
            "examples_seen": checkpoint.examples_seen,
            "reports_due": checkpoint.reports_due,
            "extra": checkpoint.extra,
            "attempts": checkpoint.attempts,
            "identity": identity,
            "environment": environment,
            "files": files,
        }
        write_json(temporary / "checkpoint.json", {**record, "digest": digest(record)})
        permit()
        if target.exists():
            target.rename(parent / f".{target.name}.old.tmp")
        temporary.rename(target)
        sync_folder(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(parent / f".{target.name}.old.tmp", ignore_errors=True)
    return target


def read_checkpoint(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint and the identity of its run, every byte verified. Raises Damaged."""
    record = read_record(folder)
    groups = {}
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise Damaged(f"{name} has {path.stat().st_size:,} bytes instead of {expected['bytes']:,}")
        if sha256_file(path) != expected["sha256"]:
            raise Damaged(f"{name} has another sha256 than when it was written")
        try:
            groups[path.stem] = safetensors.torch.load_file(path)
        except SafetensorError as error:
            raise Damaged(f"{name} is not a safetensors file: {error}") from None
    attempts = record.get("attempts", ())
    checkpoint = Checkpoint(
        step=record["step"],
        examples_seen=record["examples_seen"],
        reports_due=record["reports_due"],
        groups=groups,
        extra=record["extra"],
        attempts=attempts if isinstance(attempts, dict) else dict.fromkeys(attempts, 0),
    )
    return checkpoint, record["identity"]


def read_record(folder: Path) -> dict[str, Any]:
    """The verified checkpoint.json of a folder. Raises Damaged."""
    try:
        record = read_json(folder / "checkpoint.json")
        stated = record.pop("digest")
        actual = digest(record)
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"checkpoint.json cannot be read: {error}") from None
    if stated != actual:
        raise Damaged("checkpoint.json has another digest than when it was written")
    if record["format"] != FORMAT:
        raise Damaged(f"it has format {record['format']}; this version reads format {FORMAT}")
    if folder.name != folder_name(record["step"]):
        raise Damaged(f"it holds step {record['step']:,}")
    return dict(record)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with writing(path):
        try:
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except SafetensorError as error:  # the library tells what the system said in its own way
            raise OSError(str(error)) from None
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
