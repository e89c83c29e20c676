"""The state folder of a run: ownership by one process, writing, retention and resumption of its checkpoints."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.config.base import differing_keys
from image_diffusion.core.files.atomic import digest, make_folder, read_json, remove_unfinished, write_bytes, write_json
from image_diffusion.core.files.checksums import warn_about_previews
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.names import inside
from image_diffusion.core.process.errors import log_line, room_at
from image_diffusion.training.checkpoint.checkpoint import (
    Background,
    Checkpoint,
    Damaged,
    checkpoints_in,
    folder_name,
    part_list_path,
    read_checkpoint,
    read_record,
    temporary_folder,
    wait_for_path,
    write_checkpoint,
    write_rows,
)
from image_diffusion.training.config import CheckpointConfig
from image_diffusion.training.parallel.world import HANG_S

_SEEN_S = 60.0
"""Seconds until every machine sees a new file on a shared file system."""
_SHOWN_KEYS = 3
"""Number of keys that differ from the previous run to print."""
_KEY_WIDTH = 100
"""Maximum number of characters of each key."""


class NullState:
    """State of a process that writes nothing."""

    advice = ""
    previews: Path | None = None

    def assert_owner(self) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def wait(self) -> None: ...

    def check(self) -> None: ...

    def save_weights(
        self, folder: Path, tensors: dict[str, Tensor], model: dict[str, Any], carried: Mapping[str, Path]
    ) -> None: ...

    def remove(self, folder: Path) -> None: ...


class PartWriter(Background, NullState):
    """State of a process that writes its rows into the checkpoints that the first process completes."""


class State(Background):
    """The checkpoints of one run in `<root>/<fingerprint>/`. The run is identified by `identity`, plain data.

    Only one process uses it, after `claim`. Checkpoints are written by a background thread. If they have parts of
    several processes, each other process has a `part_writer`, and a checkpoint is complete when all parts are written.
    The process that claims the root also owns the outputs of the training next to it, of any run. num_steps: number of
    steps of the run; later checkpoints, of a longer configuration of it, are neither loaded nor removed. hang_s:
    seconds to wait for a part. split: `Checkpoint.split`; empty: not compared.
    """

    def __init__(
        self,
        root: Path,
        identity: dict[str, Any],
        keep: CheckpointConfig,
        num_steps: int = sys.maxsize,
        hang_s: float = HANG_S,
        split: str = "",
    ) -> None:
        super().__init__(self._complete)
        self.identity, self.fingerprint = identity, digest(identity)[:16]
        self._root, self._keep, self._num_steps = root, keep, num_steps
        self._hang_s, self._split = hang_s, split
        self.token = ""
        self._good: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints of this run."""
        return self._root / self.fingerprint

    @property
    def previews(self) -> Path:
        """Folder of the previews that this run draws during training."""
        return self._root.parent / "previews" / self.fingerprint

    @property
    def advice(self) -> str:
        """Return a sentence on the last undamaged checkpoint, for the end of an error message."""
        return f"State kept in {self._good}." if self._good else "There is no checkpoint yet."

    def claim(self) -> None:
        """Become the owner of the root. A previous owner notices before its next write, and ends.

        Removes the unfinished files of killed processes.
        """
        make_folder(self.folder)
        self.token = uuid.uuid4().hex
        owner = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        if job := os.environ.get("SLURM_JOB_ID"):
            owner["slurm_job"] = job
        write_json(self._root / "owner.json", owner)
        for left in self._root.glob("*/.*.tmp"):  # also of a run before this one
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        for folder in (self._root, self._root.parent, self._root.parent / "raw", *self.previews.parent.glob("*")):
            remove_unfinished(folder)

    def load(self) -> Checkpoint | None:
        """Read the newest undamaged checkpoint; None if there is none. Damaged checkpoints are reported, renamed and
        skipped.

        Raises ValueError if the checkpoint belongs to another configuration, with the keys that differ, or to another
        split into training and held-out images.
        """
        if later := [path.name for path in checkpoints_in(self.folder) if path not in self.checkpoints()]:
            log_line(
                f"note: {self.folder} also holds {', '.join(later)}, past the {self._num_steps:,} steps asked for. "
                f"It is kept for a longer run."
            )
        for path in reversed(self.checkpoints()):
            try:
                checkpoint, identity = read_checkpoint(path)
            except Damaged as damage:
                aside = self.folder / f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"
                path.rename(aside)
                log_line(
                    f"warning: checkpoint {path} is damaged: {damage}. It is kept as {aside.name}; "
                    "an older one is used."
                )
                continue
            if identity != self.identity:
                keys = ", ".join(differing_keys(self.identity, identity))
                raise ValueError(
                    f"Checkpoint {path} belongs to another configuration: {keys}. Remove {self.folder} to start anew."
                )
            if self._split and checkpoint.split not in ("", self._split):
                raise ValueError(
                    f"Checkpoint {path} is of a training that held out other images: files were saved again with equal "
                    f"pixels, and the split is by their bytes. Restore the files, or remove {self._root} to train anew."
                )
            self._good = path
            return checkpoint
        self._note_another_run()
        return None

    def _note_another_run(self) -> None:
        """If this run has no checkpoint, print how it differs from the last run in this root that got beyond step 0,
        and where that run is stored."""
        paths = [path for path in self._root.glob("*/step-*") if path.name != folder_name(0)]
        if checkpoints_in(self.folder) or not paths:
            return
        try:
            path = max(paths, key=lambda path: path.stat().st_mtime)
            record = read_record(path)
        except (Damaged, OSError):
            return
        differing = differing_keys(self.identity, record["identity"])
        keys = "; ".join(shorten(key, _KEY_WIDTH, placeholder=" …)") for key in differing[:_SHOWN_KEYS])
        several = f"; and {len(differing) - _SHOWN_KEYS} more" if len(differing) > _SHOWN_KEYS else ""
        log_line(
            f"note: this training starts at step 0, for it differs from the earlier one: {keys}{several}. The earlier "
            f"one, of {record['step']:,} steps, stays in {path.parent} (docs/extend_training.md)."
        )

    def check_previews(self) -> None:
        """Print which previews are damaged; nothing else reads them before the end. Without a checkpoint, remove them,
        since all are drawn again."""
        if checkpoints_in(self.folder):
            warn_about_previews(self.previews)
        else:
            shutil.rmtree(self.previews, ignore_errors=True)

    def checkpoints(self) -> list[Path]:
        """Return the folders of checkpoints, oldest first."""
        return [path for path in checkpoints_in(self.folder) if int(path.name.removeprefix("step-")) <= self._num_steps]

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint to the host and write it in the background. Waits for the previous write.

        Raises the error of the previous write: OSError, or ValueError if another process has become the owner.
        """
        self.wait()
        self.assert_owner()
        super().save(checkpoint)

    def _complete(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, with the parts of all processes, and remove expired checkpoints."""
        step = checkpoint.step

        def others(folder: Path, part: int) -> dict[str, Any]:
            path = part_list_path(folder, part)
            if not wait_for_path(path, self._hang_s):
                self.assert_owner()
                raise ValueError(
                    f"Process {part} has not written its part of the checkpoint of step {step:,} within "
                    f"{self._hang_s:,.0f} s. {self.advice} Look for its error, and run the same command again."
                )
            files: dict[str, Any] = read_json(path)
            return files

        with _unwritten(step, self.folder, self.advice, self.assert_owner):
            whole = replace(checkpoint, split=self._split)
            self._good = write_checkpoint(
                self.folder, whole, self.identity, environment(), self.assert_owner, self.token, others
            )
            self._prune()

    def assert_owner(self) -> None:
        """Raise ValueError if another process has become the owner, so that this process must not write."""
        owner = read_json(self._root / "owner.json")
        if owner["token"] != self.token:
            raise ValueError(
                f"Process {owner['pid']} on {owner['host']} has taken over {self._root}; this one ends without "
                f"writing. Let one process train an experiment at a time."
            )

    def save_weights(
        self, folder: Path, tensors: dict[str, Tensor], model: dict[str, Any], carried: Mapping[str, Path]
    ) -> None:
        """Write the weights of this run into a folder, after the accompanying files `carried`, by name."""
        for name, path in carried.items():
            self.assert_owner()
            write_bytes(inside(folder, name), path.read_bytes())
        save_weights(folder, tensors, {**model, "fingerprint": self.fingerprint}, self.assert_owner)

    def remove(self, folder: Path) -> None:
        """Remove a folder that an earlier training wrote."""
        self.assert_owner()
        shutil.rmtree(folder, ignore_errors=True)

    def _prune(self) -> None:
        paths = self.checkpoints()
        keep = set(paths[-self._keep.keep_last :])
        if self._keep.keep_every:
            keep |= {path for path in paths if int(path.name.removeprefix("step-")) % self._keep.keep_every == 0}
        for path in paths:
            if path not in keep:
                aside = path.rename(path.with_name(f".{path.name}.old.tmp"))
                shutil.rmtree(aside, ignore_errors=True)


def part_writer(root: Path, fingerprint: str, token: str, hang_s: float = HANG_S) -> PartWriter:
    """Return the writer of this process's rows into the checkpoints that the first process of a training completes.

    root, fingerprint, token: attributes of the first process's `State`. Raises ValueError if its files are not visible
    here.
    """
    folder, until = root / fingerprint, time.monotonic() + _SEEN_S
    while not _owns(root, token):
        if time.monotonic() > until:
            raise ValueError(
                f"{root} on {socket.gethostname()} is not the folder that the first process writes, but with "
                f"train.sharding full or machine each writes its part of a checkpoint. Put the results on a file "
                f"system that all machines share, or set train.sharding to optimizer."
            )
        time.sleep(0.1)

    def write(checkpoint: Checkpoint) -> None:
        step = checkpoint.step
        if not wait_for_path(temporary_folder(folder, step, token), hang_s):
            raise ValueError(
                f"The checkpoint of step {step:,} was not begun by the first process in {folder} within {hang_s:,.0f} "
                f"s. Look for its error, and run the same command again."
            )
        with _unwritten(step, folder):
            write_rows(temporary_folder(folder, step, token), checkpoint)

    return PartWriter(write)


def _owns(root: Path, token: str) -> bool:
    try:
        return bool(read_json(root / "owner.json")["token"] == token)
    except ValueError:  # missing so far
        return False


@contextmanager
def _unwritten(
    step: int, folder: Path, advice: str = "", assert_owner: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise an OSError of this context again with the step and folder of the checkpoint. assert_owner: raises first if
    another process has become the owner, which removes unfinished files."""
    try:
        yield
    except OSError as error:
        assert_owner()
        raise OSError(
            f"The checkpoint of step {step:,} could not be written in {folder}: {error}. {room_at(folder)} "
            f"{advice} Make room and run the same command again."
        ) from None


def environment() -> dict[str, str]:
    """Return the environment in which a checkpoint was written, which may explain differing numbers."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": device,
        "processes": os.environ.get("WORLD_SIZE", "1"),
        "threads": str(torch.get_num_threads()),
    }
