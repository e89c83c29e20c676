"""A training of one project to its end, and what the judge sees in its images: a seed of `make peers`.

    python tests/bench/peers/reaching.py speedrun_digits diffusers FOLDER SEED
    python tests/bench/peers/reaching.py speedrun_cifar10 --change train.steps=400 --images cifar10-20k ours FOLDER SEED

Prints one line of JSON. A peer is trained for twice the CPU seconds of our recipe. The distance is between samples and
the training images, in the features of the classifier that the stage `detect` trains. Sampling is not timed. The scores
of our recipe are kept in FOLDER: run it before the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leaderboard import EXPERIMENTS, Prepared, features, measured, prepared, with_images
from run import HERE, PEERS
from torch import Tensor

from image_diffusion.core.config.base import changed, read_inherited
from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.features.classifier import Classifier, load_detector
from recipes import RECIPES

Score = dict[str, float]
"""What is printed: CPU seconds, distance, steps; of ours also the number of parameters."""

SAMPLES = 500
TIMES = 2
"""A peer's CPU seconds, as a multiple of ours."""


def ours(inputs: Prepared, raw: dict[str, Any], seed: int, judge: Classifier, real: Tensor) -> Score:
    """Our recipe, trained to its end. The training of its codec counts."""
    experiment = parse_experiment(changed(raw, [f"train.seed={seed}", f"sample.seed={seed}"]), "ours")
    run = measured(experiment, inputs, SAMPLES, judge, real)
    run["cpu_s"] += inputs.codec_cpu_s
    return {name: run[name] for name in ("cpu_s", "distance", "steps", "parameters")}


def theirs(peer: str, images: Path, seed: int, ours: Score, judge: Classifier, real: Tensor) -> Score:
    """A peer's recipe."""
    line = [str(PEERS), str(HERE / "recipes.py"), peer, str(images), str(seed), str(int(ours["parameters"]))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line += [str(SAMPLES), str(TIMES * ours["cpu_s"])]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    score: Score = json.loads(done.stdout.splitlines()[-1])
    samples = torch.from_numpy(np.load(images.with_name(f"{peer}.npy")))
    with torch.no_grad():
        return {**score, "distance": frechet_between(judge(samples).features, real).value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="in config/experiments")
    parser.add_argument("peer", choices=["ours", *RECIPES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--change", action="append", default=[], help="of the experiment: train.steps=400")
    parser.add_argument("--images", help="a folder of classes, in place of the experiment's own images")
    arguments = parser.parse_args()
    name, peer, seed = arguments.experiment, arguments.peer, arguments.seed
    folder = arguments.folder / f"reaching-{name}"
    torch.set_num_threads(1)
    file = read_inherited(EXPERIMENTS / f"{name}.yaml")[0]
    raw = changed(with_images(file, arguments.images, file["data"]["name"]), arguments.change)
    inputs = prepared(folder, name, raw, arguments.images)
    judge, crops = load_detector(inputs.data / "detector"), open_shards(inputs.data / "crops", "train")
    real, scores = features(judge, crops), folder / f"ours-{seed}.json"
    if peer == "ours":
        score = ours(inputs, raw, seed, judge, real)
        write_json(scores, score)
    else:
        pixels = folder / ("mirrored.npy" if raw["train"]["flip_probability"] > 0 else "images.npy")
        if not pixels.exists():
            np.save(pixels, crops.gather(np.arange(crops.num_samples)).numpy())
        score = theirs(peer, pixels, seed, read_json(scores), judge, real)
    print(json.dumps({key: score[key] for key in ("cpu_s", "distance", "steps")}))


if __name__ == "__main__":
    main()
