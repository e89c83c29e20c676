"""How many CPU seconds of training digits take to 95 % agreement: the record, and any change that is held against it.

    python tests/bench/bench_speedrun.py --seeds 3 --experiments demo speedrun_digits
    python tests/bench/bench_speedrun.py --experiments speedrun_digits --set train.optimizer.lr=0.003

Crops, latents and the judge are made once, by Snakemake, in a folder of their own (--folder keeps them). A training
stops at every `--every` steps; 500 images of its averaged weights, new seeds each time, are judged; the clock is the
process's CPU time without that, on one thread, from the first weight on. The record is in RESULTS.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from image_diffusion.core.config.base import changed, dump, read_inherited, to_yaml
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import train_stage
from image_diffusion.metrics.distances.frechet import frechet_between
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.parallel.world import World
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Task

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "config" / "experiments"
ENOUGH = 0.95
"""Share of images in which the judge sees the digit that was asked for."""
IMAGES = 500
Look = tuple[int, float, float, float]
"""A step, CPU seconds of training until then, agreement and Fréchet distance."""


class EnoughError(Exception):
    """The training has made what was asked of it."""


def prepared(folder: Path) -> Path:
    """The data set that all share: its crops, the latents of the demo's codec, the judge."""
    data = folder / "results" / "datasets" / "digits-32"
    if not (data / "detector" / "detector.json").is_file():
        (folder / "config").mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / "config" / "experiments").symlink_to(EXPERIMENTS)
        targets = [f"results/datasets/digits-32/{name}.json" for name in ("demo_codec/manifest", "detector/detector")]
        settings = ["--configfile", str(ROOT / "config" / "config.yaml"), "--config", "experiments=[demo]"]
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]
        subprocess.run([*command, *targets, *settings], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return data


def experiment(name: str, changes: list[str], seed: int) -> Experiment:
    raw, _ = read_inherited(EXPERIMENTS / f"{name}.yaml")
    return parse_experiment(changed(raw, [*changes, f"train.seed={seed}"]), name)


def measure(found: Experiment, data: Path, every: int, first: int, until: float) -> list[Look]:
    """What is seen at each of these steps. Stops where the agreement is enough."""
    judge, curve, away = load_detector(data / "detector"), list[Look](), 0.0
    real = open_shards(data / "crops", "train")
    with torch.no_grad():
        features = judge(real.gather(np.arange(real.num_samples))).features
    with tempfile.TemporaryDirectory() as temporary:
        config, output = Path(temporary) / "train.yaml", Path(temporary) / "train"
        quiet = {"validate_every_steps": None, "grid_every_steps": every, "checkpoint": {"every_steps": 10**6}}
        plain = dump(train_stage("speedrun", found))
        config.write_text(to_yaml({**plain, "train": plain["train"] | quiet}))
        weights = data.parents[1] / "demo_codec" / "train" / "weights.safetensors"
        training = prepare_training(config, data / "demo_codec" / "manifest.json", weights)
        codec, settings = training.decoder(), found.section("sample")
        began = time.process_time()

        def look(network: nn.Module, step: int, folder: Path) -> Mapping[str, Path | float]:
            nonlocal away
            started = time.process_time()
            if step >= first:
                asked = settings.model_copy(update={"seed": step})
                seeds = torch.arange(IMAGES)
                labels = seeds % training.spec.num_classes
                generator = Generator(network, training.stage.system.reading, training.spec, codec, asked)  # type: ignore[arg-type]
                parts = zip(seeds.split(100), labels.split(100), strict=True)
                with torch.no_grad():
                    seen = judge(torch.cat([generator(some, of) for some, of in parts]))
                assert seen.logits is not None
                agreement = float((seen.logits.argmax(dim=1) == labels).double().mean())
                distance = frechet_between(seen.features, features).value
                curve.append((step, started - began - away, agreement, distance))
                print("  {:5d} steps {:6.1f} CPU s  agreement {:.3f}  FD {:.2f}".format(*curve[-1]), flush=True)
                if agreement >= until:
                    raise EnoughError
            away += time.process_time() - started
            return {}

        def build(world: World) -> Task:
            return replace(training.build(world), grid=look)

        with suppress(EnoughError):
            run(build, training.stage.train, training.model, training.data, output)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=["demo", "speedrun_digits"], help="names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings (0 1 2)")
    parser.add_argument("--every", type=int, default=25, help="steps from one look to the next (25)")
    parser.add_argument("--first", type=int, default=1, help="the first step that is looked at (1)")
    parser.add_argument("--until", type=float, default=ENOUGH, help="agreement that is enough (0.95)")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="KEY=VALUE, of all experiments")
    parser.add_argument("--folder", type=Path, help="keep crops, latents and judge here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        data = prepared(arguments.folder or Path(temporary))
        times: dict[str, list[float]] = {name: [] for name in arguments.experiments}
        for seed in arguments.seeds:
            for name in arguments.experiments:
                print(f"{name}, seed {seed}", flush=True)
                found = experiment(name, arguments.changes, seed)
                curve = measure(found, data, arguments.every, arguments.first, arguments.until)
                times[name].append(
                    next((s for _, s, agreement, _ in curve if agreement >= arguments.until), float("inf"))
                )
    for name, seconds in times.items():
        each = ", ".join(f"{one:.1f}" for one in seconds)
        print(f"{name:20} {np.mean(seconds):6.1f} CPU s to {arguments.until:.0%} agreement ({each})")
    first, *others = times
    for name in others:
        print(f"{name} is {np.mean(times[first]) / np.mean(times[name]):.2f} times faster than {first}")


if __name__ == "__main__":
    main()
