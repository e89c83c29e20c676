"""The training loop, which is the same for every system."""

from __future__ import annotations

from image_diffusion.core.process.errors import Stopped
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.trainer import Trainer


def train(trainer: Trainer, reports: Reports, stop: Stop, step: int) -> None:
    """Train from `step`, the number of updates done, to the end, and save a checkpoint of the last step. Raises Stopped
    on a request to stop, ValueError if a loss or gradient is not finite, OSError if a checkpoint cannot be written.
    """
    stopping = stop.poll()
    if reports.pending or (step == 0 and reports.should_report(step)):
        reports.report(step)
        reports.save(step)
    batches = reports.timed(trainer.batches(step))
    while step < trainer.last_step and not (stopping or reports.pending):
        step += 1
        examples = next(batches)
        rate = trainer.set_learning_rate(step)
        losses = trainer.backward(examples, step)  # forward, backward, sum over processes
        norm = trainer.clip_gradients()
        trainer.update(step)  # the weights, then their averages
        trainer.observe(step, losses, norm)

        stopping = stop.poll()
        if reports.should_log(step):
            reports.log(step, rate)
        if reports.should_report(step):
            reports.report(step)
        if reports.should_save(step) or stop.saves or stopping:
            reports.save(step)
    batches.close()
    stop.close()
    reports.close()
    if step < trainer.last_step or reports.pending:
        raise Stopped(
            f"asked by {stop.reason}; step {step:,} of {trainer.steps:,} is saved, and the same command goes on from "
            "it."
        )
