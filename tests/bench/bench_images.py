"""What a network of fixed cost makes of few and of many images: the distance and the copies of its samples.

    python tests/bench/bench_images.py CROPS DETECTOR FOLDER --numbers 50 200 1000 --augment

CROPS is a folder of crops of CIFAR-10 with held-out images, and DETECTOR the classifier that the stage `detect` trained
on crops of it. For each number, as many images of each class are trained on; 1,000 samples at each step are compared
with the held-out images, as the detector sees them, and searched for copies of the training images (the share that is
nearer to one than 99 % of the held-out images are). Prints a row of Markdown for each step. FOLDER, a new
one, keeps the trainings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leaderboard import features
from peers.run import row
from PIL import Image
from torch import Tensor

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.weights import save_weights
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import train_stage
from image_diffusion.metrics.distances.frechet import frechet_between
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.metrics.images.memorization import find_copies, reduced
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.checkpoint.averaged_weights import weights_at
from image_diffusion.training.load_model import load_model
from image_diffusion.training.session import run

SAMPLES = 1000
STEPS = (500, 1000, 1500)


def experiment_of(folder: Path, augment: bool) -> Experiment:
    """The experiment of docs/choosing.md, on images in a folder. Augmentation beyond mirroring if wanted."""
    raw: dict[str, Any] = {
        "data": {
            "name": "few",
            "source": {"type": "folder", "path": str(folder)},
            "resolution": 32,
            "validation_fraction": 0,
            "num_shards": 1,
        },
        "system": {
            "type": "dit",
            "network": {
                "depth": 4, "width": 128, "num_heads": 4, "patch": 8, "label_init_std": 0.5,
                "norm": "rms_norm", "qk_norm": True, "mlp": "swiglu", "rope": True,
            },
            "process": {"type": "flow", "times": {"type": "logit_normal"}, "time_scale": 1000},
            "objective": {
                "type": "flow_matching", "prediction": "x0", "loss": "velocity", "label_drop_probability": 0.1,
            },
        },
        "train": {
            "steps": STEPS[-1],
            "global_batch": 64,
            "optimizer": {"type": "muon", "lr": 1e-2},
            "schedule": {"type": "constant", "warmup_steps": 50},
            "grad_clip": 1.0,
            "ema": {"type": "exponential", "rates": [0.995], "warmup": None},
            "flip_probability": 0.5,
            "validate_every_steps": None,
            "grid_every_steps": None,
            "checkpoint": {"every_steps": STEPS[0], "keep_every": STEPS[0]},
            **({"augment": {}} if augment else {}),
        },
        "sample": {"num_samples": SAMPLES, "sampler": {"type": "heun", "num_steps": 10}, "batch_size": 250},
        "resources": {"gpus_per_node": 0},
    }  # fmt: skip
    return parse_experiment(raw, "few")


def written(crops: Shards, number: int, folder: Path) -> None:
    """As many images of each class, in a folder for each."""
    for label, name in enumerate(crops.classes):
        rows = np.flatnonzero(crops.labels == label)[: number // crops.num_classes]
        (folder / name).mkdir(parents=True)
        for place, pixels in zip(rows.tolist(), crops.gather(rows).permute(0, 2, 3, 1).numpy(), strict=True):
            Image.fromarray(pixels).save(folder / name / f"{place:05}.png")


def drawn(weights: Path, experiment: Experiment, codec: Any) -> Tensor:
    """Samples of all classes, uint8 [N, 3, 32, 32]. codec: decodes them."""
    model = load_model(weights)
    make: Any = Generator(model.network, model.system.reading, model.spec, codec, experiment.section("sample"))  # type: ignore[arg-type, attr-defined]
    seeds = torch.arange(SAMPLES)
    with torch.no_grad():
        return torch.cat([make(some, some % model.spec.num_classes) for some in seeds.split(250)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crops", type=Path)
    parser.add_argument("detector", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numbers", type=int, nargs="+", required=True)
    parser.add_argument("--augment", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judge = load_detector(arguments.detector)
    crops, held_out = (open_shards(arguments.crops, split) for split in ("train", "validation"))
    real = features(judge, held_out)
    for number in arguments.numbers:
        folder = arguments.folder / f"{number}{'-augmented' * arguments.augment}"
        written(crops, number, folder / "images")
        experiment = experiment_of(folder / "images", arguments.augment)
        crop_dataset(experiment.data, folder / "crops")
        (folder / "train.yaml").write_text(to_yaml(dump(train_stage("few", experiment))))
        training = prepare_training(folder / "train.yaml", folder / "crops/manifest.json", None, [])
        run(training.build, training.stage.train, training.model, training.data, folder / "train")
        trained_on = open_shards(folder / "crops", "train")
        for step in STEPS:
            weights = folder / f"step-{step}"
            tensors, model = weights_at(folder / "train" / "state", folder / "train", step)
            save_weights(weights, tensors, {name: model[name] for name in model if name not in ("format", "sha256")})
            samples = drawn(weights, experiment, training.decoder())
            with torch.no_grad():
                distance = frechet_between(judge(samples).features, real)
            copies = share_estimate(find_copies(reduced(samples).features, trained_on, held_out).flagged)
            assert copies.interval is not None
            low, high = copies.interval
            cells = [f"{trained_on.num_samples:,}", "yes" if arguments.augment else "no", f"{step:,}"]
            cells += [f"{distance.value:.1f}", f"{copies.value:.3f} [{low:.3f}, {high:.3f}]"]
            print(row(cells), flush=True)


if __name__ == "__main__":
    main()
