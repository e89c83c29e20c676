"""What a run tells and leaves behind beside the steps: log lines, validation, pictures, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median_low

import torch.distributed as dist

from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.progress import Progress
from image_diffusion.core.verify import write_listing
from image_diffusion.data.batches import Examples
from image_diffusion.training.background import Background
from image_diffusion.training.machine import Machine
from image_diffusion.training.meter import means_of
from image_diffusion.training.parts import Parts
from image_diffusion.training.signals import Stop
from image_diffusion.training.state import State
from image_diffusion.training.validation import validation_sums

VALIDATION_CHUNK = 64


class Reports:
    """Everything here is done by all processes together, between two steps; files are written by the first.

    state, and a journal that keeps something, are given in the first process only. helper: in others that write parts
    of checkpoints.
    """

    def __init__(
        self,
        parts: Parts,
        journal: Journal | NullJournal,
        stop: Stop,
        state: State | None,
        step: int,
        helper: Background | None = None,
    ) -> None:
        self._writer = state or helper
        self._parts, self._journal, self._stop, self._state = parts, journal, stop, state
        self._machine = Machine(parts.world.device) if state is not None else None
        self._progress = Progress("train", parts.config.steps, "step", initial=step) if state is not None else None
        self._examples: Examples | None = None
        self._logged_step, self._logged_at = step, time.monotonic()
        self._waited_s = self._away_s = 0.0

    def timed(self, batches: Iterator[Examples]) -> Generator[Examples, None, None]:
        """The same batches; how long each is waited for is counted, and shown as a step."""
        started = time.monotonic()
        for examples in batches:
            self._waited_s += time.monotonic() - started
            if self._writer is not None:
                self._writer.check()
            if self._progress is not None:
                self._progress.advance()
            self._examples = examples
            yield examples
            started = time.monotonic()

    def log(self, step: int, rate: float) -> None:
        """Write the means since the last log into the journal."""
        waited_s = self._check_health(self._parts.gradients.waits.take_s())
        means = self._parts.meter.take()  # waits for the device, so that the clock below is right
        now, config = time.monotonic(), self._parts.config
        elapsed = max(now - self._logged_at - self._away_s, 1e-9)
        examples = (step - self._logged_step) * config.global_batch
        values = {f"train/{key}": value for key, value in means.items()}
        values |= {
            "train/learning_rate": rate,
            "speed/examples_per_second": examples / elapsed,
            "speed/steps_per_second": (step - self._logged_step) / elapsed,
            "speed/waiting_for_data": self._waited_s / elapsed,
        }
        slowest, words = self._slowest(waited_s, elapsed)
        values |= slowest
        if self._parts.precision.skips_overflow:
            values["train/loss_scale"] = self._parts.precision.scaler.get_scale()
        if self._examples is not None:
            with self._parts.eagerly():
                losses_of = partial(self._parts.losses, 0)
                values |= self._parts.speed.values(examples / elapsed, self._examples, losses_of)
        if self._machine is not None:
            values |= self._machine.readings()
        self._journal.metrics(values, step, step * config.global_batch)
        self._logged_step, self._logged_at, self._waited_s, self._away_s = step, time.monotonic(), 0.0, 0.0
        if self._progress is not None:
            self._progress.advance(0, f"loss {means['loss']:.4f}{words}")

    def are_due(self, step: int) -> bool:
        """Whether a validation or a grid belongs to this step."""
        return self._validates(step) or self._draws(step)

    def make(self, step: int) -> bool:
        """Validate and draw. False, in every process, when it was given up because the run was asked to stop."""
        started = time.monotonic()
        made = (not self._validates(step) or self._validate(step)) and (not self._draws(step) or self._draw(step))
        self._away_s += time.monotonic() - started
        return made

    def save(self, step: int, due: bool) -> None:
        """Save a checkpoint, never one that is not finite. due: whether this step's reports are still to be made."""
        started = time.monotonic()
        self._check_health()
        checkpoint = self._parts.capture(step, due)
        if self._state is not None:
            attempts = self._journal.attempts
            self._journal.sync()
            checkpoint = replace(checkpoint, attempts=attempts)
        if self._writer is not None:
            self._writer.save(checkpoint)
        self._away_s += time.monotonic() - started

    def close(self) -> None:
        """Wait until what this process writes of the last checkpoint is on disk; in the first, all of it."""
        if self._writer is not None:
            self._writer.wait()
        if self._progress is not None:
            self._progress.close()

    def _check_health(self, waited_s: float = 0.0) -> list[float]:
        def advice() -> str:
            if self._writer is not None:
                self._writer.wait()
            return "" if self._state is None else self._state.advice

        return self._parts.health.check(advice, waited_s)

    def _slowest(self, waited_s: list[float], elapsed: float) -> tuple[dict[str, float], str]:
        """Which process the others wait for: numbers for the journal and words for people, where there are several
        whose waiting is known. waited_s: by each for sums, of so many seconds."""
        world = self._parts.world
        if world.size == 1 or self._parts.flat.sums_gradients:
            return {}, ""
        shares = [max(0.0, 1 - each / elapsed) for each in waited_s]
        share = max(shares)
        rank = shares.index(share)
        numbers = {"slowest_share": share, "median_share": median_low(shares), "slowest_process": float(rank)}
        words = f", slowest: {world.hosts[rank]} (process {rank}), {share:.0%} own work"
        return {f"speed/{key}": value for key, value in numbers.items()}, words

    def _validates(self, step: int) -> bool:
        config = self._parts.config
        every = config.validate_every_steps
        data = self._parts.task.validation
        return data is not None and data.num_samples > 0 and every is not None and _at(step, every, config.steps)

    def _draws(self, step: int) -> bool:
        config = self._parts.config
        every = config.grid_every_steps
        if self._parts.task.grid is None or every is None:
            return False
        return step == 0 or _at(step, every, config.steps)

    def _validate(self, step: int) -> bool:
        parts, config = self._parts, self._parts.config
        data = parts.task.validation
        assert data is not None
        chunk = min(VALIDATION_CHUNK, config.microbatch or config.global_batch)
        with parts.averaged():
            sums = self._stop.interruptible(
                lambda: validation_sums(
                    data, config.validation_samples, chunk, parts.world, partial(parts.validation_losses, step)
                )
            )
        if parts.world.any(sums is None):
            return False
        assert sums is not None
        if parts.world.size > 1:
            for rows in sums.values():
                dist.all_reduce(rows)  # every row is one process's and zero elsewhere: no rounding
        means = means_of({key: rows.sum(0) for key, rows in sums.items()})
        values = {f"validation/{key}": value for key, value in means.items()}
        self._journal.metrics(values, step, step * config.global_batch)
        parts.validated(step, means["loss"])
        return True

    def _draw(self, step: int) -> bool:
        grid, world = self._parts.task.grid, self._parts.world
        assert grid is not None
        with self._parts.averaged() as network:
            found: Mapping[str, Path | float] | None = {}
            if self._state is not None:
                self._state.permit()
                found = self._stop.interruptible(partial(grid, network, step, self._state.previews))
                write_listing(self._state.previews, f"step-{step:07d}*")
        numbers = {}
        for key, what in (found or {}).items():
            if isinstance(what, Path):
                self._journal.image(key, what, step)
            else:
                numbers[f"validation/{key}"] = what
        if numbers:
            self._journal.metrics(numbers, step, step * self._parts.config.global_batch)
        return not world.any(found is None)


def _at(step: int, every: int, steps: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens after this step."""
    return step > 0 and (step % every == 0 or step == steps)
