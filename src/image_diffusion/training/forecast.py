"""What a whole training takes, from a few of its steps: time, memory, disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from image_diffusion.core.journal import NullJournal
from image_diffusion.nn.precision import Precision as SampledIn
from image_diffusion.nn.precision import tf32
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.counted import kept_elsewhere
from image_diffusion.training.distributed import World
from image_diffusion.training.loop import train
from image_diffusion.training.parts import Parts, Task
from image_diffusion.training.precision import Precision
from image_diffusion.training.reports import VALIDATION_CHUNK
from image_diffusion.training.signals import Stop
from image_diffusion.training.speed import flops_per_example, product_rate
from image_diffusion.training.validation import validation_sums

GIB = 2.0**30


@dataclass(frozen=True)
class Forecast:
    """Of one training. Times leave out what processes wait for one another; memory is that of the fullest process.

    parameters: trainable ones. evaluation_s: one pass of the network over one image, without gradient, in the precision
    of the training; passes_s: the same in others, by name.
    """

    device: str
    processes: int
    parameters: int
    steps: int
    step_s: float
    images_per_second: float
    tflops: float
    share_of_peak: float
    evaluation_s: float
    passes_s: dict[SampledIn, float]
    train_s: float
    validation_s: float
    memory_gib: float
    checkpoint_gib: float
    disk_gib: float

    @property
    def total_s(self) -> float:
        """Steps and validations."""
        return self.train_s + self.validation_s


def forecast(
    build: Callable[[World], Task],
    config: TrainConfig,
    processes: int,
    steps: int = 5,
    sampled_in: Sequence[SampledIn] = (),
) -> Forecast:
    """Train `steps` steps of one of `processes` processes, here, and reckon. Leaves no file.

    sampled_in: precisions in which a pass without gradient is timed as well.

    Raises ValueError when a step needs more memory than there is.
    """
    share = -(-config.global_batch // processes)
    own = config.model_copy(
        update={"global_batch": share, "validate_every_steps": None, "grid_every_steps": None, "max_hours": None}
    )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = World(0, 1, device)
    try:
        parts = Parts(build(world), own, world)
        _train(parts, world, 0, 2)  # one to warm up, and one more: a second one can still allocate
        started = time.perf_counter()
        _train(parts, world, 2, 2 + steps)
        step_s = (time.perf_counter() - started) / steps
        evaluation_s, validation_s = _validation(parts, world)
        passes_s = {each: _pass(parts, world, each) for each in sampled_in}
        flops = flops_per_example(next(parts.batches(0)), partial(parts.losses, 0))
    except torch.OutOfMemoryError:
        raise ValueError(
            f"A step of {share} examples a process does not fit into the memory of {torch.cuda.get_device_name()}. "
            f"Make train.microbatch smaller, or take more processes."
        ) from None
    peak = product_rate(device, parts.precision.dtype)
    checkpoint = sum(t.nbytes for group in parts.capture(0, False).groups.values() for t in group.values())
    every = config.validate_every_steps
    validations = -(-config.steps // every) if every else 0
    return Forecast(
        device=torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        processes=processes,
        parameters=sum(parameter.numel() for parameter in parts.flat.parameters.values()),
        steps=config.steps,
        step_s=step_s,
        images_per_second=config.global_batch / step_s,
        tflops=flops * share / step_s / 1e12,
        share_of_peak=flops * share / step_s / peak,
        evaluation_s=evaluation_s,
        passes_s=passes_s,
        train_s=config.steps * step_s,
        validation_s=validations * validation_s / processes,
        memory_gib=(_memory(device, checkpoint) - kept_elsewhere(parts, config, processes)) / GIB,
        checkpoint_gib=checkpoint / GIB,
        disk_gib=_kept(config) * checkpoint / GIB + 4 * parts.flat.size / GIB,
    )


def memory_limit(device_memory: bool, requested_mb: int | None) -> float:
    """GiB that one process (on a GPU) or all processes of a machine together may use."""
    if device_memory and torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory) / GIB
    return requested_mb / 1024 if requested_mb is not None else float(psutil.virtual_memory().total) / GIB


def free_disk(folder: Path) -> float:
    """GiB free where a folder is, or will be."""
    existing = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    return float(psutil.disk_usage(str(existing)).free) / GIB


def _train(parts: Parts, world: World, start: int, stop: int) -> None:
    parts.config = parts.config.model_copy(update={"steps": stop, "log_every_steps": stop})
    train(parts, start, False, None, NullJournal(), Stop(world, None))  # its log line waits for the device


def _validation(parts: Parts, world: World) -> tuple[float, float]:
    """Seconds of one image and of one whole validation, from one chunk of it."""
    one = _evaluation(parts, world)
    config, held_out = parts.config, parts.task.validation
    return one, one * (min(config.validation_samples, held_out.num_samples) if held_out else 0)


def _pass(parts: Parts, world: World, precision: SampledIn) -> float:
    """Seconds of one image in a pass of the network in another precision."""
    trained_in, parts.precision = parts.precision, Precision("bf16" if precision == "bf16" else "float32", world.device)
    try:
        with tf32(precision != "float32"):
            return _evaluation(parts, world)
    finally:
        parts.precision = trained_in


def _evaluation(parts: Parts, world: World) -> float:
    """Seconds of one image in the loss of a chunk of the validation, the second time that it is computed."""
    data, config = parts.task.validation or parts.task.data, parts.config
    chunk = min(VALIDATION_CHUNK, config.microbatch or config.global_batch, data.num_samples)
    seconds = 0.0
    with parts.averaged():
        for _ in range(2):  # the first chooses kernels
            started = time.perf_counter()
            sums = validation_sums(data, chunk, chunk, world, partial(parts.validation_losses, 0))
            sums["loss"].tolist()  # waits for the device
            seconds = (time.perf_counter() - started) / chunk
    return seconds


def _memory(device: torch.device, checkpoint: int) -> int:
    """Bytes: on a GPU the most that PyTorch took, and what the driver, libraries and other programs take; on a CPU the
    most that was in use, and the copy of which a checkpoint is written."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(torch.cuda.max_memory_reserved(device)) + total - free - torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss) + checkpoint


def _kept(config: TrainConfig) -> int:
    """Checkpoints on disk at the fullest: the last ones, one that is being written, and those kept for good."""
    saves = -(-config.steps // config.checkpoint.every_steps)
    for_good = config.steps // config.checkpoint.keep_every if config.checkpoint.keep_every else 0
    return min(config.checkpoint.keep_last + 1, saves) + for_good
