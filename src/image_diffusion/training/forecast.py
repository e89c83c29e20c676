"""Forecast of a whole training from a few of its steps: time, memory, disk."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.nn.precision import Precision as SampledIn
from image_diffusion.nn.precision import tf32
from image_diffusion.training.checkpoint.capture import capture
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.flops import bytes_on_other_processes
from image_diffusion.training.loop import train
from image_diffusion.training.monitor.meter import flops_per_example, product_rate, validation_sums
from image_diffusion.training.monitor.reports import VALIDATION_CHUNK, Reports
from image_diffusion.training.optim.numerics import Precision, switches
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

GIB = 2.0**30
_PROBE, _BLOCK = 256 << 20, 8 << 20  # bytes written to measure a disk
MEASURING_S = 20.0
"""Seconds that a forecast measures, in addition to the first step and to work in progress at the end."""


class Deadline:
    """A time from now. limit_s: seconds until then."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._end = limit_s, time.perf_counter() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end - time.perf_counter())


@dataclass(frozen=True)
class Forecast:
    """Forecast of one training. Times exclude waiting between processes; memory is the maximum over the processes.

    parameters: number of trainable parameters. measured_steps: number of timed steps. evaluation_s: seconds of a
    forward pass over one image, in the precision of the training; passes_s: the same in other precisions, by name.
    not_measured: passes for which there was no time, and which are estimated as a third of a step (a backward pass
    takes twice the operations of the forward pass).
    """

    device: str
    processes: int
    parameters: int
    steps: int
    measured_steps: int
    step_s: float
    images_per_second: float
    tflops: float
    share_of_peak: float
    evaluation_s: float
    passes_s: dict[SampledIn, float]
    not_measured: tuple[str, ...]
    train_s: float
    validation_s: float
    memory_gib: float
    checkpoint_gib: float
    disk_gib: float

    @property
    def total_s(self) -> float:
        """Seconds of all steps and validations."""
        return self.train_s + self.validation_s


def forecast(
    build: Callable[[World], Task],
    config: TrainConfig,
    processes: int,
    steps: int = 5,
    sampled_in: Sequence[SampledIn] = (),
    until: Deadline | None = None,
    per_machine: int | None = None,
) -> Forecast:
    """Train the first step, the last, and `steps` from the middle, as one of `processes` processes, and extrapolate.
    Leaves no files.

    sampled_in: further precisions in which to time a forward pass. until: deadline of the measurements; unset:
    MEASURING_S from now. per_machine: number of processes on each machine; unset: all.

    Raises ValueError if a step needs more memory than the device has.
    """
    share, key = config.share_of(processes), config.microbatch_key
    own = config.model_copy(
        update={"global_batch": share, "validate_every_steps": None, "grid_every_steps": None, "max_hours": None}
    )
    until = until or Deadline(MEASURING_S)
    device = best_device()
    world = World(0, 1, device, hosts=(socket.gethostname(),))
    own = own.on_hardware(world)
    with switches(own.deterministic, own.tf32, bool(own.compile)):
        try:
            trainer = Trainer(build(world), own, world)
            step_s, measured_steps = _steps(trainer, world, config.steps, steps, until)
            checkpoint = sum(t.nbytes for group in capture(trainer, 0, False).groups.values() for t in group.values())
            memory = _memory(device, checkpoint)
            weights = sum(tensor.nbytes for tensor in trainer.raw_weights().values()) * (1 + config.keep_raw)
            passes_s, not_measured = _passes(trainer, world, step_s / share / 3, sampled_in, until)
            evaluation_s = passes_s.pop(None)
            flops = flops_per_example(next(trainer.batches(0)), partial(trainer.losses, 1 + config.steps // 2))
        except torch.OutOfMemoryError:
            raise ValueError(
                f"A step of {share} examples a process does not fit into the memory of {torch.cuda.get_device_name()}. "
                f"Make {key} smaller, or take more processes."
            ) from None
        peak = product_rate(device, trainer.precision.dtype)
    every, held_out = config.validate_every_steps, trainer.task.validation
    validated = min(config.validation_samples, held_out.num_samples) if held_out and every else 0
    return Forecast(
        device=torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        processes=processes,
        parameters=sum(parameter.numel() for parameter in trainer.flat.parameters.values()),
        steps=config.steps,
        measured_steps=measured_steps,
        step_s=step_s,
        images_per_second=config.global_batch / step_s,
        tflops=flops * share / step_s / 1e12,
        share_of_peak=flops * share / step_s / peak,
        evaluation_s=evaluation_s,
        passes_s={name: seconds for name, seconds in passes_s.items() if name},
        not_measured=not_measured,
        train_s=config.steps * step_s,
        validation_s=-(-config.steps // every) * validated * evaluation_s / processes if every else 0.0,
        memory_gib=(memory - bytes_on_other_processes(trainer, config, processes, per_machine)) / GIB,
        checkpoint_gib=checkpoint / GIB,
        disk_gib=(config.checkpoint.most_kept(config.steps) * checkpoint + weights) / GIB,
    )


def memory_limit(device_memory: bool, requested_mb: int | None) -> float:
    """Return the GiB that one process (on a GPU) or all processes of a machine together may use."""
    if device_memory and torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory) / GIB
    return requested_mb / 1024 if requested_mb is not None else float(psutil.virtual_memory().total) / GIB


def free_disk(folder: Path) -> float:
    """Return the free GiB on the file system of a folder, which may not exist yet."""
    return float(psutil.disk_usage(str(_existing(folder))).free) / GIB


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def _steps(trainer: Trainer, world: World, last: int, steps: int, until: Deadline) -> tuple[float, int]:
    """Return the seconds of a step, and the number of timed steps: `steps` from the middle of the training, fewer if
    time is short, or a warmup step if no time is left. The first and the last step warm up (a second step can still
    allocate), and include the memory of terms of the loss that begin or end during the training."""

    def timed(start: int, stop: int) -> float:
        started = time.perf_counter()
        trainer.steps, trainer.intervals = stop, replace(trainer.intervals, log=stop)
        signals = Stop(world, None)
        train(trainer, Reports(trainer, signals, start), signals, start)  # its log line waits for the device
        return (time.perf_counter() - started) / (stop - start)

    step_s = timed(0, 1)
    if not until.left_s:
        return step_s, 1
    step_s = timed(last - 1, last)
    measured = min(steps, int(until.left_s / step_s))
    return (timed(last // 2, last // 2 + measured), measured) if measured else (step_s, 1)


def _passes(
    trainer: Trainer, world: World, reckoned_s: float, sampled_in: Sequence[SampledIn], until: Deadline
) -> tuple[dict[SampledIn | None, float], tuple[str, ...]]:
    """Return the seconds of one image in a forward pass, by precision (None: the training's), and the precisions for
    which there was no time and `reckoned_s` is used."""
    seconds: dict[SampledIn | None, float] = {}
    not_measured = []
    for precision in (None, *sampled_in):
        if not until.left_s:
            seconds[precision] = reckoned_s
            not_measured.append(precision or "the training's")
        else:
            seconds[precision] = _pass(trainer, world, precision, until)
    return seconds, tuple(not_measured)


def _pass(trainer: Trainer, world: World, precision: SampledIn | None, until: Deadline) -> float:
    """Return the seconds of one image in a forward pass in a precision; None: the training's."""
    if precision is None:
        return _evaluation(trainer, world, until)
    trained_in = trainer.precision
    trainer.precision = Precision("bf16" if precision == "bf16" else "float32", world.device)
    try:
        with tf32(precision != "float32"):
            return _evaluation(trainer, world, until)
    finally:
        trainer.precision = trained_in


def _evaluation(trainer: Trainer, world: World, until: Deadline) -> float:
    """Return the seconds of one image in the loss of a validation chunk: of the second run, if there is time for
    two."""
    data = trainer.task.validation or trainer.task.data
    chunk = min(VALIDATION_CHUNK, trainer.microbatch, data.num_samples)
    seconds = 0.0
    with trainer.averaged():
        for _ in range(2):  # the first chooses kernels
            started = time.perf_counter()
            sums = validation_sums(data, chunk, chunk, world, partial(trainer.validation_losses, 0))
            sums["loss"].tolist()  # waits for the device
            seconds = (time.perf_counter() - started) / chunk
            if not until.left_s:
                break
    return seconds


def _memory(device: torch.device, checkpoint: int) -> int:
    """Return the peak memory in bytes: on a GPU the maximum that PyTorch reserved, plus the driver, libraries and other
    programs; on a CPU the peak of this process, plus the copy from which a checkpoint is written."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(torch.cuda.max_memory_reserved(device)) + total - free - torch.cuda.memory_reserved(device)
    status = Path("/proc/self/status")
    if status.exists():  # Linux: of this program alone, where getrusage also counts what started it
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1]) + checkpoint
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + checkpoint  # macOS: bytes


def seconds_to_save(size: int, folder: Path) -> float:
    """Return the seconds to write, flush and hash a checkpoint of `size` bytes in a folder, which may not exist yet.
    Writes and removes up to 256 MiB. Raises OSError."""
    probe = max(_BLOCK, min(size, _PROBE))
    block = os.urandom(_BLOCK)  # incompressible
    with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".doctor-") as file:
        started = time.perf_counter()
        for _ in range(0, probe, _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        sha256_file(Path(file.name))
        return (time.perf_counter() - started) * size / (-(-probe // _BLOCK) * _BLOCK)


def signal_lead_advice(save_s: float, grace_s: float) -> str | None:
    """Return advice if saving takes longer than the time between Slurm's signal and the end; None otherwise."""
    if save_s <= grace_s:
        return None
    lead = -(-round(2 * save_s + 30) // 60) * 60
    return (
        f"A checkpoint takes {save_s:.0f} s to save, and a time limit leaves {grace_s:.0f}: steps since the one before "
        f'would be lost. Let Slurm say so earlier, in config.yaml: slurm: {{stages: {{train: {{slurm_extra: "--signal='
        f'TERM@{lead}"}}}}}}.'
    )
