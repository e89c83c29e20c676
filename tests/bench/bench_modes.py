"""Cost of each mode of `train.deterministic`: the training steps of the demos in each mode, in turn.

    OMP_NUM_THREADS=1 python tests/bench/bench_modes.py --rounds 15

Each mode has a training of its own, and the modes take turns: a round is so many steps of each, and what is told is the
median over the rounds of a mode's seconds over those of `off` in the same round. With one CPU thread the processor's
clock counts, so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from bench_train import Latents
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.systems import AnySystem
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.loop import train
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.optim.numerics import Mode, switches
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

RECIPES = Path(__file__).parents[2] / "config" / "experiments"
DEMOS = {"demo": (4, 8), "iddpm_demo": (3, 32), "rin_demo": (3, 32), "dvae_demo": (3, 32)}
"""Channels and edge length of each demo's training data."""


def training(name: str, mode: Mode, batch: int) -> Callable[[int], float]:
    """Return a demo's training on random numbers: number of steps -> seconds."""
    channels, side = DEMOS[name]
    spec = DataSpec(channels=channels, resolution=side, num_classes=10)
    system: Any = parse(AnySystem, yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["system"], name)

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        return Batch(stored, {"label": label % 10} if "sample" in system.sections else {}, streams)

    torch.manual_seed(0)
    data: Any = Latents(side, channels=channels)
    world = World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = TrainConfig.model_validate({"steps": 1, "global_batch": batch, "deterministic": mode})
    parts = Trainer(Task(system.build_network(spec), system.build_objective(spec), prepare, data), config, world)
    alone = world.device.type == "cpu" and torch.get_num_threads() == 1
    clock, done = time.process_time if alone else time.perf_counter, 0

    def steps(count: int) -> float:
        nonlocal done
        parts.steps = done + count
        with switches(config.deterministic, config.tf32, bool(config.compile)):
            started = clock()
            stop = Stop(world, None)
            train(parts, Reports(parts, stop, done), stop, done)
            seconds = clock() - started
        done += count
        return seconds

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="append", choices=DEMOS, help="which of the demos (all)")
    parser.add_argument("--batch", type=int, default=32, help="examples of a step (32)")
    parser.add_argument("--steps", type=int, default=4, help="steps timed at once (4)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of all modes (15)")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, batch {given.batch}", flush=True)
    for name in given.demo or DEMOS:
        trainings = {mode: training(name, mode, given.batch) for mode in get_args(Mode)}
        rounds = [{mode: steps(given.steps) for mode, steps in trainings.items()} for _ in range(given.rounds + 1)][1:]
        for mode in trainings:
            ratios = sorted(each[mode] / each["off"] for each in rounds)
            spread = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
            seconds = statistics.median(each[mode] for each in rounds) / given.steps
            print(
                f"{name:12} {mode:7} {seconds:8.4f} s a step, {statistics.median(ratios):.3f} of off ({spread})",
                flush=True,
            )


if __name__ == "__main__":
    main()
