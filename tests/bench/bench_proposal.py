"""The file that `init` proposes, beside eleven others of equal time: the tables of docs/choosing.md.

    python tests/bench/bench_proposal.py --images cifar10-20k --budget 5min

Twelve trainings of one seed: three learning rates of AdamW and of Muon, each with a network that predicts x0 or the
velocity. All have the CPU seconds that the proposed steps take on one core. Prints the Fréchet distance between 1,000
samples and the training images, in the features of the classifier that the stage `detect` trains. Without --images,
the bundled digits. Images with captions or masks are refused: the samples have classes at most.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from leaderboard import Prepared, features, measured, prepared
from PIL import Image
from sklearn.datasets import load_digits

from image_diffusion.core.config.base import changed
from image_diffusion.core.config.yaml12 import from_text
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.tools.budget import propose_for

RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (4e-3, 1e-2, 2e-2)}
"""Learning rates at a width of 128; the second is the proposed one."""
NAME, SAMPLES = "proposed", 1000


def digits(folder: Path) -> Path:
    """Write the bundled digits as pictures of 32 x 32 in ten folders."""
    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / f"{label}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = (image.reshape(8, 8) * (255 / 16)).astype("uint8")
        Image.fromarray(grey).resize((32, 32), Image.Resampling.BICUBIC).save(path)
    return folder


def variants(width: int) -> Iterator[tuple[str, float, str, list[str]]]:
    """Yield optimizer, rate at a width of 128, prediction, and the settings of each variant."""
    for optimizer, rates in RATES.items():
        betas = ", betas: [0.9, 0.99]" if optimizer == "adamw" else ""
        for rate in rates:
            line = f"train.optimizer={{type: {optimizer}, lr: {rate * 128 / width:.6f}{betas}}}"
            for prediction in ("x0", "velocity"):
                yield optimizer, rate, prediction, [line, f"system.objective={{prediction: {prediction}}}"]


def lasting(steps: int) -> list[str]:
    """Return the settings that depend on the number of steps, as the proposal sets them."""
    rate = min(0.9999, round(math.pow(0.5, 1 / (0.05 * steps)), 5))
    schedule = f"train.schedule={{warmup_steps: {min(1000, max(10, steps // 20))}}}"
    return [f"train.steps={steps}", schedule, f"train.ema={{rates: [{rate}]}}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder, zip or table of images (the bundled digits)")
    parser.add_argument("--budget", default="5min", help="of the proposal (5min)")
    parser.add_argument("--cpu-seconds", type=float, help="of each training (what the proposed steps take)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = arguments.images or digits(folder / "digits")
        raw: dict[str, Any] = from_text(propose_for(images.resolve(), arguments.budget, 1).text)
        if "pairs" in raw:
            parser.error(f"{images} has captions or masks. Give images without.")
        raw["train"]["weights"] = "ema"
        table(raw, prepared(folder, NAME, raw, None), arguments.cpu_seconds)


def table(raw: dict[str, Any], inputs: Prepared, cpu_s: float | None) -> None:
    """Train all variants and print their results as Markdown."""
    judge, crops = load_detector(inputs.data / "detector"), open_shards(inputs.data / "crops", "train", renders=True)
    real = features(judge, crops)

    def trained(steps: int, samples: int, changes: list[str]) -> dict[str, Any]:
        experiment = parse_experiment(changed(raw, [*lasting(steps), *changes]), NAME)
        return measured(experiment, inputs, samples, judge, real)

    def step_s(changes: list[str]) -> float:
        short, long = (trained(steps, 10, changes)["cpu_s"] for steps in (20, 80))
        return float(long - short) / 60

    rows = [*variants(raw["system"]["network"]["width"])]
    taken = {row[0]: step_s(row[3]) for row in rows[:: len(rows) // 2]}
    proposed = raw["train"]["optimizer"]["type"], raw["system"]["objective"]["prediction"]
    seconds = cpu_s or raw["train"]["steps"] * taken[proposed[0]]
    print(
        "| Optimizer | Rate | Prediction | Steps | CPU seconds | Distance |\n| --- | --- | --- | ---: | ---: | ---: |"
    )
    for optimizer, rate, prediction, changes in rows:
        steps = round(seconds / taken[optimizer])
        run = trained(steps, SAMPLES, changes)
        is_proposed = (optimizer, prediction) == proposed and rate == RATES[optimizer][1]
        cells = [optimizer, f"{rate:g}", prediction, f"{steps:,}", f"{run['cpu_s']:.0f}", f"{run['distance']:.2f}"]
        print("| " + " | ".join(f"**{cell}**" if is_proposed else cell for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
