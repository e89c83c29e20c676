"""The processes of a training. A process without a launcher is a world of size 1."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from image_diffusion.core.devices import check_kernels, has_gpu

T = TypeVar("T")

HANG_S = 600.0
"""Default number of seconds that a process waits for another."""


@dataclass(frozen=True)
class World:
    """This process's place among all processes. rank: 0 … size - 1. device: device of this process.

    control: a process group on the CPU, for decisions that should not wait for a GPU. patient: such a group with a time
    limit of a day. per_machine: number of processes on each machine; unset: all. group: the process group that `gather`
    covers; unset: all processes. hosts: the machine of each process.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    per_machine: int | None = None
    group: dist.ProcessGroup | None = None
    hosts: tuple[str, ...] = ()
    patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """True if this process writes the files."""
        return self.rank == 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor of one shape in every process -> [size, *shape], the same in every process."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather_into_tensor(gathered.flatten(), tensor.contiguous().flatten(), group=self.group)
        return gathered

    def exchange(self, rows: Tensor) -> Tensor:
        """Send row r of [size, ...] to process r -> the rows that this process received, in the order of the ranks."""
        if self.size == 1:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        return received

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: T) -> T:
        """Return the value of rank 0 in every process. For small objects, since it is sent from CPU to CPU."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def any(self, flag: bool, patient: bool = False) -> bool:
        """Return True if the flag is set in any process. Waits for all processes; patient: for up to a day."""
        if self.size == 1:
            return flag
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.patient if patient else self.control)
        return bool(value)


def place_on_node() -> float:
    """Return LOCAL_RANK / LOCAL_WORLD_SIZE of torchrun: 0 for the first process of this machine, below 1 for the
    last."""
    return int(os.environ.get("LOCAL_RANK", "0")) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def join(timeout_s: float = HANG_S) -> Iterator[World]:
    """Return the world of this process, from torchrun's RANK, LOCAL_RANK and WORLD_SIZE, or of size 1.

    Each process gets a CUDA device if the machine has one, else the CPU. timeout_s: seconds that a process waits for
    another. Raises ValueError if torchrun starts more processes on a machine than it has GPUs, if the stage requested
    GPUs and PyTorch can use none, or if PyTorch has no kernels for this GPU.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    device = torch.device("cpu")
    if has_gpu():
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"{here} processes cannot share the {gpus} GPU{'s' * (gpus > 1)} of {host}: each needs its own. Set "
                f"resources.processes_per_node to {gpus} (--config processes_per_node={gpus}), or ask for more GPUs."
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        torch.cuda.set_device(device)
        check_kernels(device)
    if size == 1:
        yield World(0, 1, device, hosts=(host,))
        return
    limit, day = timedelta(seconds=timeout_s), timedelta(days=1)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    try:
        control, patient = (
            cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout)) for timeout in (limit, day)
        )
        hosts = [""] * size
        dist.all_gather_object(hosts, host, group=control)
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield World(rank, size, device, control, per_machine, hosts=tuple(hosts), patient=patient)
    finally:
        dist.destroy_process_group()
