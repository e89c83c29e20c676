"""`doctor`: measure a few steps of a training and say what all of it takes, before it starts.

    python -m image_diffusion.doctor --config train.yaml --data manifest.json --output doctor.json

After 20 s it stops measuring, says so, and reckons with what it has. Refuses, with one line, what the memory or the
disk has no room for. With --tflops nothing is measured: what it takes of GPUs that are not here is counted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core import command, lifeline
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import write_json
from image_diffusion.data.remote import place
from image_diffusion.experiment import load_sections
from image_diffusion.nn.precision import tf32
from image_diffusion.systems.system import System
from image_diffusion.train import Training, prepare_training
from image_diffusion.training.counted import counted
from image_diffusion.training.forecast import GIB, MEASURING_S, Deadline, Forecast, forecast, free_disk, memory_limit
from image_diffusion.training.saving import seconds_to_save, told_too_late


def main() -> None:
    parser = command.Parser(prog="python -m image_diffusion.doctor", description=__doc__)
    parser.add_config("the configuration of the stage train, YAML")
    parser.add_argument("--data", type=place, required=True, help="manifest.json of the crops or latents: path or URL")
    parser.add_argument("--codec-weights", type=Path, help="weights of the experiment that trained the codec")
    parser.add_argument("--pairs", type=place, help="manifest.json of what the system reads beside its data")
    parser.add_argument("--sample", type=Path, help="the configuration of the stage sample, to count it in")
    parser.add_argument("--sample-jobs", type=int, default=1, help="jobs that make the samples at the same time (1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines that will train together (1)")
    parser.add_argument("--processes-per-node", type=int, default=1, help="processes on each (1)")
    parser.add_argument("--memory-mb", type=int, help="memory that training may use on each machine (all there is)")
    parser.add_argument(
        "--grace-s", type=float, default=lifeline.GRACE_S, help="seconds to save when told to end (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps to measure (5)")
    parser.add_argument(
        "--tflops",
        type=float,
        help="count instead of measuring, for a GPU that is not here and does so many TFLOP/s (an H200 in bf16: 400)",
    )
    parser.add_argument("--output", type=Path, required=True, help="doctor.json to write, beside the folder `train`")
    arguments = parser.parse_args()

    training = prepare_training(
        arguments.config, arguments.data, arguments.codec_weights, arguments.pairs, arguments.changes
    )
    per_node = arguments.processes_per_node
    processes = arguments.nodes * per_node
    if arguments.tflops is not None:
        tell_counted(training, processes, arguments.tflops, arguments.output, per_node)
        return
    system, every = training.stage.system, training.stage.train.grid_every_steps
    shown: Any = training.stage.preview
    made: Any = None
    if arguments.sample is not None:
        made = load_sections(arguments.sample, ["sample"], system.sections)["sample"]
    sampled_in = {system.sampled_in(each) for each in (shown, made) if each is not None and system.evaluations(each)}
    until = Deadline(MEASURING_S)
    found = forecast(
        training.build, training.stage.train, processes, arguments.steps, sorted(sampled_in), until, per_node
    )
    decode_s = decoding_seconds(training, until) if sampled_in else 0.0
    previews = -(-found.steps // every) if every else 0
    previews_s = previews * sampling_seconds(shown, system, found, decode_s or 0.0)
    sample_s = sampling_seconds(made, system, found, decode_s or 0.0)
    side_by_side = sample_s / arguments.sample_jobs
    on_gpu = torch.cuda.is_available()
    together = found.memory_gib * (1 if on_gpu else per_node)
    memory, disk = memory_limit(on_gpu, arguments.memory_mb), free_disk(arguments.output.parent)
    save_s = seconds_to_save(round(found.checkpoint_gib * GIB), arguments.output.parent)
    print(
        f"{training.stage.experiment}: {found.parameters:,} parameters, {found.steps:,} steps of "
        f"{training.stage.train.global_batch} images, {found.processes} of: {found.device}\n"
        f"time    {duration(found.total_s + previews_s + side_by_side)}: steps {duration(found.train_s)} "
        f"({found.images_per_second:,.0f} images/s, {found.tflops:.3g} TFLOP/s, {found.share_of_peak:.0%} of the "
        f"device's measured peak), validation {duration(found.validation_s)}, previews {duration(previews_s)}, "
        f"samples {duration(side_by_side)}{by_jobs(arguments.sample_jobs)}\n"
        f"memory  {together:.2f} GiB of {memory:.2f} GiB\n"
        f"disk    {found.disk_gib:.2f} GiB of {disk:.2f} GiB free; a checkpoint has {found.checkpoint_gib:.3g} GiB and "
        f"takes {duration(save_s)} to save, of {duration(arguments.grace_s)} when time is up",
        flush=True,
    )
    if told := cut_short(found, arguments.steps, decode_s is None):
        print(told, flush=True)
    for sentence in (*training.stage.train.advice(), *filter(None, [told_too_late(save_s, arguments.grace_s)])):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    check(together, memory, found.disk_gib, disk)
    others = {"previews_s": previews_s, "sample_s": sample_s, "save_s": save_s}
    limits = {"memory_limit_gib": memory, "disk_free_gib": disk}
    write_json(arguments.output, asdict(found) | others | limits)


def tell_counted(
    training: Training, processes: int, tflops: float, output: Path, per_machine: int | None = None
) -> None:
    """Print and write what a training takes of GPUs like that, without any."""
    config = training.stage.train
    found = counted(training.network, training.task, config, processes, per_machine)
    total = found.operations * config.global_batch * config.steps
    seconds = total / (tflops * 1e12 * processes)
    print(
        f"{training.stage.experiment}: {found.parameters:,} parameters, {config.steps:,} steps of "
        f"{config.global_batch} images, counted for {processes} GPUs of {tflops:g} TFLOP/s\n"
        f"time    {duration(seconds)}: {found.operations / 1e9:,.1f} GFLOP an image, {total:.2g} operations in all\n"
        f"memory  {found.peak / GIB:.1f} GiB of each GPU, {found.fixed / GIB:.1f} GiB of it for weights, gradient, "
        f"moments and averages; driver and libraries take one or two more",
        flush=True,
    )
    write_json(output, asdict(found) | {"processes": processes, "train_s": seconds})


def sampling_seconds(settings: Any, system: System, found: Forecast, decode_s: float) -> float:
    """Seconds in which images are made on one device: passes of the network like the one that was timed in the same
    precision, and the decoding. settings: None: no images are made. decode_s: of one image."""
    calls = system.evaluations(settings) if settings is not None else 0
    if not calls:
        return 0.0
    return float(settings.num_samples * (calls * found.passes_s[system.sampled_in(settings)] + decode_s))


def by_jobs(number: int) -> str:
    """Words for several that work side by side; none for one."""
    return f" by {number} jobs side by side" if number > 1 else ""


def cut_short(found: Forecast, steps: int, not_decoded: bool) -> str | None:
    """A line that says what was measured when the time was over; None where all was. not_decoded: whether the codec's
    part is missing."""
    missing = [f"{found.measured_steps} of {steps} steps were timed"] if found.measured_steps < steps else []
    if found.not_measured:
        passes = ", ".join(found.not_measured)
        missing.append(f"a third of a step stands for a pass of the network ({passes})")
    if not_decoded:
        missing.append("decoding is left out")
    return f"note    measuring stopped after {MEASURING_S:g} s: {'; '.join(missing)}" if missing else None


def decoding_seconds(training: Training, until: Deadline, count: int = 4) -> float | None:
    """Seconds in which the codec decodes one image, the second time where there is time for two; None: for none."""
    if not until.left_s:
        return None
    spec, codec = training.spec, training.decoder()
    x = training.stage.system.like_samples(spec, count).to(best_device())
    seconds = 0.0
    with tf32(True):
        for _ in range(2):
            started = time.perf_counter()
            codec.decode(x).cpu()
            seconds = (time.perf_counter() - started) / count
            if not until.left_s:
                break
    return seconds


def check(memory: float, memory_limit: float, disk: float, disk_free: float) -> None:
    """Raise ValueError for what does not fit. All in GiB."""
    if memory > memory_limit:
        raise ValueError(
            f"Training needs {memory:.2f} GiB of memory, but {memory_limit:.2f} GiB may be used. Make "
            f"train.microbatch smaller, or give it more (resources.memory_mb, another GPU)."
        )
    if disk > disk_free:
        raise ValueError(
            f"Training writes {disk:.2f} GiB, but {disk_free:.2f} GiB are free. Make room, or keep fewer "
            f"checkpoints (train.checkpoint.keep_last, train.checkpoint.keep_every)."
        )


def duration(seconds: float) -> str:
    """In words: 42 s, 3.1 min, 2.4 h, 12.5 days."""
    for unit, size, next_size in (("s", 1.0, 60.0), ("min", 60.0, 3600.0), ("h", 3600.0, 86400.0)):
        if seconds < next_size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.1f} days"


if __name__ == "__main__":
    command.run(main, "train.microbatch")
