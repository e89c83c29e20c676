"""The training loop: one screen, the same for every system."""

from __future__ import annotations

from functools import partial

from image_diffusion.core.errors import Stopped
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.training.background import Background
from image_diffusion.training.parts import Parts
from image_diffusion.training.reports import Reports
from image_diffusion.training.signals import Stop
from image_diffusion.training.state import State


def train(
    parts: Parts,
    step: int,
    due: bool,
    state: State | None,
    journal: Journal | NullJournal,
    stop: Stop,
    helper: Background | None = None,
) -> None:
    """Train from `step` on to the end, which leaves a checkpoint of the last step.

    step: updates done. due: whether reports of that step are still to be made. state: in the first process only.
    helper: in others that write parts of checkpoints. Raises Stopped when it was asked to stop, ValueError when a loss
    or gradient is not finite, OSError when a checkpoint cannot be written.
    """
    config = parts.config
    reports = Reports(parts, journal, stop, state, step, helper)
    stopping = stop.poll()
    if due or (step == 0 and reports.are_due(step)):
        due = not reports.make(step)
        reports.save(step, due)
    batches = reports.timed(parts.batches(step))
    while step < config.steps and not (stopping or due):
        examples = next(batches)
        rate = parts.optimizer.set_rate(config.schedule.factor(step, config.steps))
        step += 1

        losses = parts.gradients(examples, partial(parts.losses, step))
        norm = parts.clip()
        parts.update(step)
        parts.observe(step, losses, norm)

        last = step == config.steps
        stopping = stop.poll()
        if step % config.log_every_steps == 0 or last:
            reports.log(step, rate)
        if reports.are_due(step):
            due = not reports.make(step)
        if step % config.checkpoint.every_steps == 0 or stop.saves or last or stopping or due:
            reports.save(step, due)
    batches.close()
    stop.close()
    reports.close()
    if step < config.steps or due:
        raise Stopped(
            f"asked by {stop.reason}; step {step:,} of {config.steps:,} is saved, and the same command goes on from it."
        )
