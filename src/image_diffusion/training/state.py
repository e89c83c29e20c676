"""The state folder of a run: its checkpoints, who may write them, which to keep, which to go on from."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.config import differing_keys
from image_diffusion.core.exhausted import room_at
from image_diffusion.core.files import digest, read_json, remove_unfinished, write_json
from image_diffusion.training.checkpoint import (
    Checkpoint,
    Damaged,
    read_checkpoint,
    write_checkpoint,
)
from image_diffusion.training.config import CheckpointConfig


class State:
    """`<root>/<fingerprint>/`: the checkpoints of the run that `identity`, plain data, tells from every other.

    One process uses it, and only after `claim`. Checkpoints are written by a thread of their own. Whoever claims the
    root owns everything that a training writes beside it, whatever run it is of. num_steps: of the run; checkpoints of
    later steps are from when it was longer, and are left alone.
    """

    def __init__(
        self, root: Path, identity: dict[str, Any], keep: CheckpointConfig, num_steps: int = sys.maxsize
    ) -> None:
        self.identity, self.fingerprint = identity, digest(identity)[:16]
        self.folder, self._root = root / self.fingerprint, root
        self._keep = keep
        self._token, self._num_steps = "", num_steps
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._good: Path | None = None

    @property
    def previews(self) -> Path:
        """Where what this run draws on the way lies."""
        return self._root.parent / "previews" / self.fingerprint

    @property
    def holds_any(self) -> bool:
        """Whether a checkpoint is kept here, also past the steps asked for."""
        return bool(self._all())

    @property
    def advice(self) -> str:
        """Where the last good checkpoint is, for the end of an error message."""
        return f"State kept in {self._good}." if self._good else "There is no checkpoint yet."

    def claim(self) -> None:
        """Become the one that writes here: whoever did before finds out before it next writes, and ends.

        What a killed process left half-written is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._token = uuid.uuid4().hex
        write_json(
            self._root / "owner.json",
            {"token": self._token, "host": socket.gethostname(), "pid": os.getpid(), **_slurm_job()},
        )
        for left in self._root.glob("*/.*.tmp"):  # also of a run before this one
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        for folder in (self._root, self._root.parent, self._root.parent / "raw", *self.previews.parent.glob("*")):
            remove_unfinished(folder)

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint; None when there is none. A damaged one is told, put aside, and passed over.

        Raises ValueError with the keys that differ when a checkpoint in here belongs to another configuration.
        """
        if later := [path.name for path in self._all() if path not in self.checkpoints()]:
            print(
                f"note: {self.folder} also holds {', '.join(later)}, past the {self._num_steps:,} steps asked for. "
                f"It is kept for a longer run.",
                file=sys.stderr,
                flush=True,
            )
        for path in reversed(self.checkpoints()):
            try:
                checkpoint, identity = read_checkpoint(path)
            except Damaged as damage:
                aside = self.folder / f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"
                path.rename(aside)
                print(
                    f"warning: checkpoint {path} is damaged: {damage}. It is kept as {aside.name}; "
                    "an older one is used.",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            if identity != self.identity:
                keys = ", ".join(differing_keys(self.identity, identity))
                raise ValueError(
                    f"Checkpoint {path} belongs to another configuration: {keys}. Remove {self.folder} to start anew."
                )
            self._good = path
            return checkpoint
        return None

    def checkpoints(self) -> list[Path]:
        """The folders of checkpoints, oldest first."""
        return [path for path in self._all() if int(path.name.removeprefix("step-")) <= self._num_steps]

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy to the host and write in the background. Waits for the write before it, if that still goes on.

        Raises what the write before it raised: OSError, or ValueError when another process has become the owner.
        """
        self.wait()
        self.permit()
        host, copied = _on_host(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(host, copied), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises what `save` says."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the last write raised, if it has ended."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, checkpoint: Checkpoint, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            self._good = write_checkpoint(self.folder, checkpoint, self.identity, environment(), self.permit)
            self._prune()
        except OSError as error:
            self._error = OSError(
                f"The checkpoint of step {checkpoint.step:,} could not be written in {self.folder}: {error}. "
                f"{room_at(self.folder)} {self.advice} Make room and run the same command again."
            )
        except BaseException as error:  # raised where the training goes on
            self._error = error

    def permit(self) -> None:
        """Raise ValueError when another process has become the owner: this one may write nothing any more."""
        owner = read_json(self._root / "owner.json")
        if owner["token"] != self._token:
            raise ValueError(
                f"Process {owner['pid']} on {owner['host']} has taken over {self._root}; this one ends without "
                f"writing. Let one process train an experiment at a time."
            )

    def _prune(self) -> None:
        paths = self.checkpoints()
        keep = set(paths[-self._keep.keep_last :])
        if self._keep.keep_every:
            keep |= {path for path in paths if int(path.name.removeprefix("step-")) % self._keep.keep_every == 0}
        for path in paths:
            if path not in keep:
                aside = path.rename(path.with_name(f".{path.name}.old.tmp"))
                shutil.rmtree(aside, ignore_errors=True)


def environment() -> dict[str, str]:
    """What a checkpoint was written with: where numbers differ, this tells why."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": device,
        "processes": os.environ.get("WORLD_SIZE", "1"),
        "threads": str(torch.get_num_threads()),
    }


def _slurm_job() -> dict[str, str]:
    job = os.environ.get("SLURM_JOB_ID")
    return {"slurm_job": job} if job else {}


def _on_host(checkpoint: Checkpoint) -> tuple[Checkpoint, torch.cuda.Event | None]:
    """The same checkpoint in host memory of its own, and what to wait for until the copies are done."""
    on_gpu = any(tensor.is_cuda for group in checkpoint.groups.values() for tensor in group.values())

    def copy(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return host.copy_(tensor.detach(), non_blocking=True)

    groups = {key: {name: copy(t) for name, t in group.items()} for key, group in checkpoint.groups.items()}
    copied = None
    if on_gpu:
        copied = torch.cuda.Event()
        copied.record()
    return replace(checkpoint, groups=groups), copied
