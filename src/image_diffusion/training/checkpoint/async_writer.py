"""Copy a checkpoint to the host at once and write it in the background while the training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from image_diffusion.training.checkpoint.checkpoint import Checkpoint

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
