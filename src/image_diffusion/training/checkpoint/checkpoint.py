"""One checkpoint: a folder of tensors and plain data that is written atomically, with a checksum for every file.

step-0001000/checkpoint.json    step, examples seen, identity of the run, sha256 and size of every other file
step-0001000/<group>.safetensors    network, each average, optimizer, objective, meter
step-0001000/<group>.1-of-8.safetensors    rows of the second of eight processes, of tensors that are sharded by rows

A checkpoint is copied to the host at once, and written in the background while the training continues.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from image_diffusion.core.files.atomic import (
    digest,
    finish_file,
    make_folder,
    read_json,
    sha256_file,
    sync_folder,
    write_json,
)
from image_diffusion.core.files.mirrored import fetch_missing
from image_diffusion.core.names import inside
from image_diffusion.core.process.errors import writing
from image_diffusion.training.parallel.flat_parameters import Vector
from image_diffusion.training.parallel.world import World

StateDict = Mapping[str, Tensor | Vector]
"""Tensors by name, the same in every process; and vectors by the prefix of their tensors' names."""
Groups = dict[str, dict[str, Tensor]]

FORMATS = (1, 2)
"""1: each group is a file. 2: rows of its tensors may be in files of several processes."""

_PLAIN = "step", "examples_seen", "reports_due", "extra", "attempts", "split"
"""Fields of a checkpoint in checkpoint.json."""
_SUFFIX = ".safetensors"
_ROWS = re.compile(r"(?P<group>.+)\.(?P<part>\d+)-of-\d+")


class Damaged(Exception):  # noqa: N818 - no error message: the reader falls back to an older checkpoint
    """A checkpoint whose bytes differ from those that were written."""


@contextmanager
def damage_as_value_error(folder: Path, then: str = "train again") -> Iterator[None]:
    """Raise ValueError if a checkpoint that is read in this context is damaged. then: advice on what to do after
    removing it."""
    try:
        yield
    except Damaged as damage:
        raise ValueError(f"Checkpoint {folder} is damaged: {damage}. Remove it, and {then}.") from None


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run resumes as if it had not been interrupted.

    step: updates done. examples_seen: examples in these updates, which is also the position in the data. reports_due:
    True if validation and sample grid of this step are still due. groups: tensors by file and name. extra: plain data.
    attempts: the journal's ids of the attempts that led to this checkpoint, each with its number of records so far.
    split: digest of the split into training and held-out images; empty in checkpoints of earlier versions.

    Only for writing: rows: this process's rows of tensors that are sharded by rows, by group and name; they are part
    `part` of `parts`. A checkpoint that was read has no rows, since its tensors are complete.
    """

    step: int
    examples_seen: int
    reports_due: bool
    groups: Groups
    extra: dict[str, Any] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    split: str = ""
    rows: Groups = field(default_factory=dict)
    part: int = 0
    parts: int = 1


class Stateful(Protocol):
    """Component whose state is small: each process loads all of it. Either tensors or plain data."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state. All processes call it together."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Resume from the state that `state_dict` returned."""
        ...


def add_tensors(group: str, state: StateDict, groups: Groups, rows: Groups) -> None:
    """Add the tensors of a state to a group, and this process's rows of sharded tensors. All processes call it
    together."""
    for name, value in state.items():
        if isinstance(value, Vector):
            for destination, tensors in zip((groups, rows), value.layout.checkpoint_tensors(value.values), strict=True):
                if tensors:  # no empty file
                    destination.setdefault(group, {}).update({f"{name}{key}": part for key, part in tensors.items()})
        else:
            groups.setdefault(group, {})[name] = value


def load_in_place(state: StateDict, tensors: Mapping[str, Tensor] | None, world: World) -> None:
    """Copy the tensors of a group from the first process into those of a state in every process. All processes call it
    together."""
    for name, value in state.items():
        if isinstance(value, Vector):
            own = None
            if tensors is not None:
                own = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
            value.layout.fill(value.values, own, world)
        else:
            if tensors is not None:
                value.copy_(tensors[name])
            world.broadcast(value)


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:07d}"


def checkpoints_in(run: Path) -> list[Path]:
    """Return the folders of the checkpoints of a run, oldest first."""
    return sorted(path for path in run.glob("step-*") if path.is_dir())


def temporary_folder(parent: Path, step: int, token: str) -> Path:
    """Return the folder that a checkpoint is written to until it is complete. token: token of the owner, so that
    orphans of earlier starts do not write to the same folder."""
    return parent / f".{folder_name(step)}.{token}.tmp"


def part_list_path(folder: Path, part: int) -> Path:
    """Return the file in which a process lists the files it has written into the folder of a checkpoint."""
    return folder / f"part-{part}.json"


def write_rows(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the rows of a process other than the first, and a list of their files, into the folder in which the first
    process writes the rest. Raises OSError."""
    files = _write_files(folder, checkpoint)
    try:
        write_json(part_list_path(folder, checkpoint.part), files)
    except FileNotFoundError:
        # The first process may have read the list already, and renamed the folder.
        if not (folder.parent / folder_name(checkpoint.step)).is_dir():
            raise


def write_checkpoint(
    parent: Path,
    checkpoint: Checkpoint,
    identity: dict[str, Any],
    environment: dict[str, str],
    check_owner: Callable[[], None],
    token: str = "new",
    others: Callable[[Path, int], dict[str, Any]] | None = None,
) -> Path:
    """Write a checkpoint and flush it to disk. check_owner: raises an exception if the checkpoint must not be written.

    identity: plain data that identifies the run. others: waits for another process's `write_rows` into a folder, and
    returns its list of files; required if the checkpoint has parts. Raises OSError, and leaves no files behind, if it
    cannot be written.
    """
    target = parent / folder_name(checkpoint.step)
    temporary = temporary_folder(parent, checkpoint.step, token)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        files = _write_files(temporary, checkpoint)
        for part in range(1, checkpoint.parts):
            assert others is not None
            files |= others(temporary, part)
            part_list_path(temporary, part).unlink()
        record = {
            "format": FORMATS[bool(checkpoint.rows)],
            **{name: getattr(checkpoint, name) for name in _PLAIN},
            "identity": identity,
            "environment": environment,
            "files": files,
        }
        write_json(temporary / "checkpoint.json", {**record, "digest": digest(record)})
        check_owner()
        if target.exists():
            target.rename(parent / f".{target.name}.old.tmp")
        temporary.rename(target)
        sync_folder(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(parent / f".{target.name}.old.tmp", ignore_errors=True)
    return target


def read_checkpoint(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Return a checkpoint and the identity of its run, after verifying every file. Raises Damaged."""
    record = read_record(folder)
    groups = dict.fromkeys(_group_of(name)[0] for name in record["files"])
    plain = {name: record[name] for name in _PLAIN if name in record}  # older versions have fewer
    checkpoint = Checkpoint(groups={group: read_group(folder, record, group) for group in groups}, **plain)
    return checkpoint, record["identity"]


def read_group(folder: Path, record: dict[str, Any], group: str) -> dict[str, Tensor]:
    """Return the complete tensors of a group by name, after verifying its files. record: result of `read_record`.
    Raises Damaged."""
    tensors: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    named = {_group_of(name): name for name in record["files"]}
    for (its, part), name in sorted(named.items()):
        if its != group:
            continue
        for key, tensor in _read_file(folder, name, record["files"][name]).items():
            if part < 0:
                tensors[key] = tensor
            else:
                rows.setdefault(key, []).append(tensor)
    return tensors | {key: torch.cat(rows.pop(key)) for key in list(rows)}


def _group_of(name: str) -> tuple[str, int]:
    """Return the group of a file's tensors, and the process whose rows they are; -1: they are complete."""
    stem = name.removesuffix(_SUFFIX)
    match = _ROWS.fullmatch(stem)
    return (match["group"], int(match["part"])) if match else (stem, -1)


def _read_file(folder: Path, name: str, expected: dict[str, Any]) -> dict[str, Tensor]:
    try:
        path = inside(folder, name)
    except ValueError as error:
        raise Damaged(str(error)) from None
    fetch_missing(folder, {name: expected["sha256"]})
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    if path.stat().st_size != expected["bytes"]:
        raise Damaged(f"{path.name} has {path.stat().st_size:,} bytes instead of {expected['bytes']:,}")
    if sha256_file(path) != expected["sha256"]:
        raise Damaged(f"{path.name} has another sha256 than when it was written")
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path.name} is not a safetensors file: {error}") from None


def read_record(folder: Path) -> dict[str, Any]:
    """Return the verified checkpoint.json of a folder. Raises Damaged."""
    try:
        record = read_json(folder / "checkpoint.json")
        stated = record.pop("digest")
        actual = digest(record)
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"checkpoint.json cannot be read: {error}") from None
    if stated != actual:
        raise Damaged("checkpoint.json has another digest than when it was written")
    if record["format"] not in FORMATS:
        raise Damaged(f"it has format {record['format']}; this version reads up to format {max(FORMATS)}")
    if folder.name != folder_name(record["step"]):
        raise Damaged(f"it holds step {record['step']:,}")
    return dict(record)


def _write_files(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write this process's files of a checkpoint. Returns sha256 and size of each file, by its name."""
    part, parts = checkpoint.part, checkpoint.parts
    files = {f"{group}{_SUFFIX}": tensors for group, tensors in checkpoint.groups.items()} if part == 0 else {}
    files |= {f"{group}.{part}-of-{parts}{_SUFFIX}": tensors for group, tensors in checkpoint.rows.items()}
    sums = {}
    with ThreadPoolExecutor(1) as hashing:  # each file while the next is written
        for name, tensors in files.items():
            _save(folder / name, tensors)
            sums[name] = hashing.submit(sha256_file, folder / name)
    return {name: {"sha256": sha256.result(), "bytes": (folder / name).stat().st_size} for name, sha256 in sums.items()}


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with writing(path):
        try:
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except SafetensorError as error:  # how the library reports an OSError
            raise OSError(str(error)) from None
        finish_file(path)


_LOOK_S = 0.02


class Background:
    """Writer of checkpoints, one after the other, in a background thread.

    write: writes a checkpoint in host memory. An error that it raises is raised in the training's next call.
    """

    def __init__(self, write: Callable[[Checkpoint], None]) -> None:
        self._write_host = write
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint to the host and begin to write it. Waits for the previous write, and raises its error."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=_on_host(checkpoint), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the last write. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the error of the last write, if it failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, checkpoint: Checkpoint, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            self._write_host(checkpoint)
        except BaseException as error:  # raised where the training goes on
            self._error = error


def wait_for_path(path: Path, limit_s: float) -> bool:
    """Wait for another process to create a file or folder. Return False after `limit_s` seconds, or if this process
    ends or the parent folder is removed. Lists the parent folder, since on a network file system a cached lookup of one
    name may be outdated."""
    until = time.monotonic() + limit_s
    with suppress(FileNotFoundError):
        while path not in path.parent.iterdir():
            if time.monotonic() > until or not threading.main_thread().is_alive():
                return False
            time.sleep(_LOOK_S)
        return True
    return False


def _on_host(checkpoint: Checkpoint) -> tuple[Checkpoint, torch.cuda.Event | None]:
    """Copy a checkpoint to host memory; return the copy, and the event that ends the copying (None without a GPU).
    Tensors that share a storage are copied at once."""
    copies: dict[int, Tensor] = {}
    on_gpu = False

    def copy(tensor: Tensor) -> Tensor:
        nonlocal on_gpu
        on_gpu |= tensor.is_cuda
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:
            there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(len(there), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copies[storage.data_ptr()] = host.copy_(there, non_blocking=True)
        own = torch.empty(0, dtype=tensor.dtype)
        return own.set_(
            copies[storage.data_ptr()].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    groups, rows = (
        {key: {name: copy(tensor) for name, tensor in group.items()} for key, group in tensors.items()}
        for tensors in (checkpoint.groups, checkpoint.rows)
    )
    copied = None
    if on_gpu:
        copied = torch.cuda.Event()
        copied.record()
    return replace(checkpoint, groups=groups, rows=rows), copied
