"""Reports of a run between its steps: log lines, validation, previews, checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median_low

import psutil
import torch
import torch.distributed as dist

from image_diffusion.core.files.checksums import write_listing
from image_diffusion.core.journal.writer import Journal, NullJournal
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.shards.loader import Examples
from image_diffusion.training.checkpoint.capture import capture
from image_diffusion.training.checkpoint.manager import NullState, State
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.monitor.meter import means_of, validation_sums
from image_diffusion.training.trainer import Trainer

VALIDATION_CHUNK = 64
_LEAST_SCALE = 2.0**-40
"""Smallest loss scale in fp16: a gradient that overflows at a smaller scale is not large, but not finite."""


class Reports:
    """Reports of a training. All processes call each method together, between two steps; the first writes the files.

    step: updates done. pending: True if the reports of that step were interrupted, and are still due.
    """

    def __init__(
        self,
        trainer: Trainer,
        stop: Stop,
        step: int = 0,
        pending: bool = False,
        state: State | NullState | None = None,
        journal: Journal | NullJournal | None = None,
    ) -> None:
        self.pending = pending
        self._trainer, self._stop = trainer, stop
        self._state, self._journal = state or NullState(), journal or NullJournal()
        self._machine = Machine(trainer.world.device)
        self._progress = Progress("train", trainer.steps, "step", step, quiet=self._state.previews is None)
        self._examples: Examples | None = None
        self._logged_step, self._logged_at = step, time.monotonic()
        self._waited_s = self._away_s = 0.0

    def timed(self, batches: Iterator[Examples]) -> Generator[Examples, None, None]:
        """Yield the batches unchanged, measure the time of waiting for them, and count each in the progress."""
        started = time.monotonic()
        for examples in batches:
            self._waited_s += time.monotonic() - started
            self._state.check()
            self._progress.advance()
            self._examples = examples
            yield examples
            started = time.monotonic()

    def should_log(self, step: int) -> bool:
        """Return True if a log line is due after this step."""
        return step % self._trainer.intervals.log == 0 or step == self._trainer.steps

    def should_report(self, step: int) -> bool:
        """Return True if a validation or previews are due after this step."""
        return self._validates(step) or self._draws(step)

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due after this step, or if its reports were interrupted."""
        is_last = step == self._trainer.last_step
        return step % self._trainer.intervals.save == 0 or is_last or self.pending

    def log(self, step: int, rate: float) -> None:
        """Write the means since the last log into the journal."""
        waited_s = self._check_health(self._trainer.gradients.waits.take_s())
        parts = self._trainer.meter.parts
        means = self._trainer.meter.take()  # waits for the device, so that the clock below is right
        now = time.monotonic()
        elapsed = max(now - self._logged_at - self._away_s, 1e-9)
        examples = (step - self._logged_step) * self._trainer.global_batch
        values = {f"train/{key}": value for key, value in means.items()}
        values |= {
            "train/learning_rate": rate,
            "speed/examples_per_second": examples / elapsed,
            "speed/steps_per_second": (step - self._logged_step) / elapsed,
            "speed/waiting_for_data": self._waited_s / elapsed,
        }
        slowest, words = self._slowest(waited_s, elapsed)
        values |= slowest
        if self._trainer.precision.skips_overflow:
            values["train/loss_scale"] = self._trainer.precision.scaler.get_scale()
        if self._examples is not None:
            with self._trainer.eagerly():
                losses_of = partial(self._trainer.losses, step)
                values |= self._trainer.speed.values(examples / elapsed, self._examples, losses_of, parts)
        values |= self._machine.readings()
        self._journal.metrics(values, step, step * self._trainer.global_batch)
        self._logged_step, self._logged_at, self._waited_s, self._away_s = step, time.monotonic(), 0.0, 0.0
        self._progress.advance(0, f"loss {means['loss']:.4f}{words}")

    def report(self, step: int) -> None:
        """Validate and draw previews. They are pending, in every process, if a request to stop interrupted them. If the
        validation ends the run, the steps since the last log are logged."""
        started = time.monotonic()
        validated = not self._validates(step) or self._validate(step)
        self.pending = not (validated and (not self._draws(step) or self._draw(step)))
        self._away_s += time.monotonic() - started
        if step == self._trainer.last_step and self._trainer.meter.parts:
            self.log(step, self._trainer.set_learning_rate(step))

    def save(self, step: int) -> None:
        """Save a checkpoint, after checking that losses and gradients are finite."""
        started = time.monotonic()
        self._check_health()
        checkpoint = capture(self._trainer, step, self.pending)
        attempts = self._journal.attempts
        self._journal.sync()
        self._state.save(replace(checkpoint, attempts=attempts))
        self._away_s += time.monotonic() - started

    def close(self) -> None:
        """Wait until this process's part of the last checkpoint is on disk; in the first process, all parts."""
        self._state.wait()
        self._progress.close()

    def _check_health(self, waited_s: float = 0.0) -> list[float]:
        def advice() -> str:
            self._state.wait()
            return self._state.advice

        waits = self._trainer.health.check(advice, waited_s)
        precision = self._trainer.precision
        if precision.skips_overflow and (scale := precision.scaler.get_scale()) < _LEAST_SCALE:
            raise ValueError(
                f"The gradient is not finite at any loss scale: fp16 has lowered it to {scale:.2g}. {advice()} "
                "Set train.precision to bf16 or float32."
            )
        return waits

    def _slowest(self, waited_s: list[float], elapsed: float) -> tuple[dict[str, float], str]:
        """Return the slowest process, as numbers for the journal and a phrase for the log; empty without waiting times
        of several processes. waited_s: seconds that each process waited for sums, out of `elapsed`."""
        world = self._trainer.world
        if world.size == 1 or self._trainer.flat.sums_gradients:
            return {}, ""
        shares = [max(0.0, 1 - seconds / elapsed) for seconds in waited_s]
        share = max(shares)
        rank = shares.index(share)
        numbers = {"slowest_share": share, "median_share": median_low(shares), "slowest_process": float(rank)}
        words = f", slowest: {world.hosts[rank]} (process {rank}), {share:.0%} own work"
        return {f"speed/{key}": value for key, value in numbers.items()}, words

    def _validates(self, step: int) -> bool:
        data, every = self._trainer.task.validation, self._trainer.intervals.validate
        return data is not None and data.num_samples > 0 and _at(step, every, self._trainer.steps)

    def _draws(self, step: int) -> bool:
        every = self._trainer.intervals.draw
        if self._trainer.task.grid is None or every is None:
            return False
        return step == 0 or _at(step, every, self._trainer.last_step)

    def _validate(self, step: int) -> bool:
        trainer = self._trainer
        data, samples = trainer.task.validation, trainer.intervals.validation_samples
        assert data is not None
        chunk = min(VALIDATION_CHUNK, trainer.microbatch)
        with trainer.averaged():
            sums = self._stop.interruptible(
                lambda: validation_sums(data, samples, chunk, trainer.world, partial(trainer.validation_losses, step))
            )
        if trainer.world.any(sums is None):
            return False
        assert sums is not None
        if trainer.world.size > 1:
            for rows in sums.values():
                dist.all_reduce(rows)  # every row is zero in all processes but one: no rounding
        means = means_of({key: rows.sum(0) for key, rows in sums.items()})
        values = {f"validation/{key}": value for key, value in means.items()}
        self._journal.metrics(values, step, step * trainer.global_batch)
        trainer.validated(step, means["loss"])
        return True

    def _draw(self, step: int) -> bool:
        grid, world = self._trainer.task.grid, self._trainer.world
        assert grid is not None
        with self._trainer.averaged() as network:
            previews: Mapping[str, Path | float] | None = {}
            if (folder := self._state.previews) is not None:
                self._state.assert_owner()
                previews = self._stop.interruptible(partial(grid, network, step, folder))
                write_listing(folder, f"step-{step:07d}*")
        numbers = {}
        for key, value in (previews or {}).items():
            if isinstance(value, Path):
                self._journal.image(key, value, step)
            else:
                numbers[f"validation/{key}"] = value
        if numbers:
            self._journal.metrics(numbers, step, step * self._trainer.global_batch)
        return not world.any(previews is None, patient=True)  # the others wait here while the first process draws


def _at(step: int, every: int | None, steps: int) -> bool:
    """Return True if an event at an interval of steps, and at the end, is due after this step."""
    return every is not None and step > 0 and (step % every == 0 or step == steps)


class Machine:
    """Load of the machine of the first process, and of this process's GPU. A reading takes microseconds. Shares of the
    CPUs are means since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._device = device
        self.readings()  # from here on the first means are taken

    def readings(self) -> dict[str, float]:
        """Return the readings under the names that MLflow groups as system metrics."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/process_cpu_percentage": self._process.cpu_percent(),
            "system/memory_usage_percentage": memory.percent,
            "system/process_memory_gib": self._process.memory_info().rss / 2**30,
        }
        if self._device.type == "cuda":
            values["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            with contextlib.suppress(Exception):  # the driver does not tell everywhere, and training goes on
                values["system/gpu_utilization_percentage"] = float(torch.cuda.utilization(self._device))
                values["system/gpu_power_usage_watts"] = torch.cuda.power_draw(self._device) / 1000
        return values
