"""Measure a few steps of a training, and forecast its time, memory and disk space.

    python -m image_diffusion doctor --config train.yaml --data manifest.json --output doctor.json

After 20 s, it stops measuring, prints a note, and uses the steps measured so far. It fails, with a one-line error, if
memory or disk do not suffice. With --tflops, nothing is measured: the cost on other GPUs is computed from the number of
operations.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.process import command, parent_watch
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.texts import duration
from image_diffusion.data.shards.remote import place
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.nn.precision import tf32
from image_diffusion.stages.train import Training, prepare_training
from image_diffusion.systems.sampling import Sampling
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.flops import counted
from image_diffusion.training.forecast import (
    GIB,
    MEASURING_S,
    Deadline,
    Forecast,
    forecast,
    free_disk,
    memory_limit,
    seconds_to_save,
    signal_lead_advice,
)

SMALLER = ("train.microbatch",)
"""Keys of an experiment that make the command need less memory when they are smaller."""


def main() -> None:
    parser = command.Parser(prog="image-diffusion doctor", description=__doc__)
    parser.add_config("the configuration of the stage train, YAML")
    parser.add_argument("--data", type=place, required=True, help="manifest.json of the crops or latents: path or URL")
    parser.add_path("--codec-weights", "weights.safetensors of the trained codec")
    parser.add_argument(
        "--pairs", type=place, nargs="+", default=[], help="manifest.json of each set that is read with the data"
    )
    parser.add_path("--sample", "configuration of the stage sample, to include its time")
    parser.add_argument(
        "--sample-jobs", type=int, default=1, help="number of sampling jobs that run at the same time (default: 1)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of machines (default: 1)")
    parser.add_argument("--processes-per-node", type=int, default=1, help="processes on each machine (default: 1)")
    parser.add_argument("--memory-mb", type=int, help="memory limit of each machine (default: all)")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=parent_watch.GRACE_S,
        help="seconds between the stop signal and the kill (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=5, help="number of steps to measure (default: 5)")
    parser.add_argument(
        "--tflops",
        type=float,
        help="count operations instead of measuring, for a GPU with this many TFLOP/s (an H200 in bf16: 400)",
    )
    parser.add_path("--output", "doctor.json to write, next to the folder `train`", required=True)
    arguments = parser.parse_args()

    training = prepare_training(
        arguments.config, arguments.data, arguments.codec_weights, arguments.pairs, arguments.changes
    )
    per_node = arguments.processes_per_node
    processes = arguments.nodes * per_node
    if arguments.tflops is not None:
        print_estimated_cost(training, processes, arguments.tflops, arguments.output, per_node)
        return
    system, every = training.stage.system, training.stage.train.grid_every_steps
    preview: Any = training.stage.preview
    samples: Any = None
    if arguments.sample is not None:
        samples = load_sections(arguments.sample, ["sample"], system.sections)["sample"]
    sampling = system.sampling()
    sampled_in = {
        sampling.precision(part) for part in (preview, samples) if part is not None and sampling.num_evaluations(part)
    }
    until = Deadline(MEASURING_S)
    cost = forecast(
        training.build, training.stage.train, processes, arguments.steps, sorted(sampled_in), until, per_node
    )
    decode_s = decoding_seconds(training, until) if sampled_in else 0.0
    previews = -(-cost.steps // every) if every else 0
    previews_s = previews * sampling_seconds(preview, sampling, cost, decode_s or 0.0)
    sample_s = sampling_seconds(samples, sampling, cost, decode_s or 0.0)
    side_by_side = sample_s / arguments.sample_jobs
    jobs = f" by {arguments.sample_jobs} jobs side by side" if arguments.sample_jobs > 1 else ""
    on_gpu = torch.cuda.is_available()
    # A GPU belongs to one process; processes on CPUs share the memory of their machine.
    together = cost.memory_gib * (1 if on_gpu else per_node)
    memory, disk = memory_limit(on_gpu, arguments.memory_mb), free_disk(arguments.output.parent)
    save_s = seconds_to_save(round(cost.checkpoint_gib * GIB), arguments.output.parent)
    print(
        f"{training.stage.experiment}: {cost.parameters:,} parameters, {steps_in_words(training.stage.train)} of "
        f"{training.stage.train.global_batch} images, {cost.processes} of: {cost.device}\n"
        f"time    {duration(cost.total_s + previews_s + side_by_side)}: steps {duration(cost.train_s)} "
        f"({cost.images_per_second:,.0f} images/s, {cost.tflops:.3g} TFLOP/s, {cost.share_of_peak:.0%} of the "
        f"device's measured peak), validation {duration(cost.validation_s)}, previews {duration(previews_s)}, "
        f"samples {duration(side_by_side)}{jobs}\n"
        f"memory  {together:.2f} GiB of {memory:.2f} GiB\n"
        f"disk    {cost.disk_gib:.2f} GiB of {disk:.2f} GiB free; a checkpoint has {cost.checkpoint_gib:.3g} GiB and "
        f"takes {duration(save_s)} to save, of {duration(arguments.grace_s)} when time is up",
        flush=True,
    )
    if note := cut_short(cost, arguments.steps, decode_s is None):
        print(note, flush=True)
    for sentence in (*training.stage.train.advice(), *filter(None, [signal_lead_advice(save_s, arguments.grace_s)])):
        log_line(f"warning: {sentence}")
    check(together, memory, cost.disk_gib, disk, training.stage.train.microbatch_key)
    others = {"previews_s": previews_s, "sample_s": sample_s, "save_s": save_s}
    limits = {"memory_limit_gib": memory, "disk_free_gib": disk}
    write_json(arguments.output, asdict(cost) | others | limits)


def steps_in_words(config: TrainConfig) -> str:
    """Return the number of steps in words: the maximum if the training may stop early."""
    return f"{config.steps:,} steps{' at most' if config.patience is not None else ''}"


def print_estimated_cost(
    training: Training, processes: int, tflops: float, output: Path, per_machine: int | None = None
) -> None:
    """Print and write the time and memory of a training on GPUs with this rate. It requires no GPU."""
    config = training.stage.train
    cost = counted(training.network, training.task, config, processes, per_machine)
    total = cost.operations * config.global_batch * config.steps
    seconds = total / (tflops * 1e12 * processes)
    print(
        f"{training.stage.experiment}: {cost.parameters:,} parameters, {steps_in_words(config)} of "
        f"{config.global_batch} images, counted for {processes} GPUs of {tflops:g} TFLOP/s\n"
        f"time    {duration(seconds)}: {cost.operations / 1e9:,.1f} GFLOP an image, {total:.2g} operations in all\n"
        f"memory  {cost.peak / GIB:.1f} GiB of each GPU, {cost.fixed / GIB:.1f} GiB of it for weights, gradient, "
        f"moments and averages; driver and libraries take one or two more",
        flush=True,
    )
    write_json(output, asdict(cost) | {"processes": processes, "train_s": seconds})


def sampling_seconds(settings: Any, sampling: Sampling, cost: Forecast, decode_s: float) -> float:
    """Return the sampling time of all images on one device, in seconds: of passes of the network, timed in the same
    precision, and of decoding. settings: None: there are no samples. decode_s: of one image."""
    calls = sampling.num_evaluations(settings) if settings is not None else 0
    if not calls:
        return 0.0
    return float(settings.num_samples * (calls * cost.passes_s[sampling.precision(settings)] + decode_s))


def cut_short(cost: Forecast, steps: int, not_decoded: bool) -> str | None:
    """Return a note on measurements that the time limit cut short; None if there are none. not_decoded: true if
    decoding was not measured."""
    missing = [f"{cost.measured_steps} of {steps} steps were timed"] if cost.measured_steps < steps else []
    if cost.not_measured:
        passes = ", ".join(cost.not_measured)
        missing.append(f"a third of a step stands for a pass of the network ({passes})")
    if not_decoded:
        missing.append("decoding is left out")
    return f"note    measuring stopped after {MEASURING_S:g} s: {'; '.join(missing)}" if missing else None


def decoding_seconds(training: Training, until: Deadline, count: int = 4) -> float | None:
    """Return the decoding time of one image in seconds, of a second pass if time allows; None if no time is left."""
    if not until.left_s:
        return None
    spec, codec = training.spec, training.decoder()
    x = training.stage.system.sampling().decoder_input(spec, count).to(best_device())
    seconds = 0.0
    with tf32(True):
        for _ in range(2):
            started = time.perf_counter()
            codec.decode(x).cpu()
            seconds = (time.perf_counter() - started) / count
            if not until.left_s:
                break
    return seconds


def check(memory: float, memory_limit: float, disk: float, disk_free: float, key: str = "train.microbatch") -> None:
    """Raise ValueError if memory or disk do not suffice. All in GiB. key: of the number of examples computed at
    once."""
    if memory > memory_limit:
        raise ValueError(
            f"Training needs {memory:.2f} GiB of memory, but {memory_limit:.2f} GiB may be used. Make "
            f"{key} smaller, or give it more (resources.memory_mb, another GPU)."
        )
    if disk > disk_free:
        raise ValueError(
            f"Training writes {disk:.2f} GiB, but {disk_free:.2f} GiB are free. Make room, or keep fewer "
            f"checkpoints (train.checkpoint.keep_last, train.checkpoint.keep_every)."
        )
