"""Distance and copies of samples of a network of fixed cost, trained on few and on many images.

    python tests/bench/bench_images.py CROPS DETECTOR FOLDER --numbers 50 200 1000 --augment '{}' --seed 1

CROPS is a folder of crops, such as those of CIFAR-10 with images held out, and DETECTOR the classifier that the stage
`detect` trained on crops of CIFAR-10. For each number, as many images of each class are trained on; samples at each
step are compared with the held-out images (with all crops where none is held out), as the detector sees them, and
searched for copies of the training images: the share that is nearer to one than 99 % of the held-out images are, or of
the other crops where none is held out, or of the training images to one another where there are fewer than 100 others.
Prints a row of Markdown for each step. FOLDER keeps the trainings and the samples.
"""

from __future__ import annotations

import argparse
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leaderboard import features
from peers.run import row
from PIL import Image
from torch import Tensor

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.weights import save_weights
from image_diffusion.data.augment import Augment
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import train_stage
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.metrics.images.memorization import find_copies, reduced
from image_diffusion.metrics.sanity_check import Part
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.checkpoint.averaged_weights import weights_at
from image_diffusion.training.load_model import load_model
from image_diffusion.training.session import run


def experiment_of(
    folder: Path,
    number: int,
    steps: list[int],
    augment: Augment | None,
    seed: int,
    start: Path | None,
    schedule: str = "constant",
) -> Experiment:
    """Return the experiment of docs/choosing.md on images in a folder. augment: `train.augment`; None: only
    mirroring."""
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
            "steps": steps[-1],
            "seed": seed,
            "init_from": None if start is None else str(start),
            "global_batch": 64 if number >= 64 else 32,
            "optimizer": {"type": "muon", "lr": 1e-2},
            "schedule": {"type": schedule, "warmup_steps": 50},
            "grad_clip": 1.0,
            "ema": {"type": "exponential", "rates": [0.995], "warmup": None},
            "flip_probability": 0.5,
            "validate_every_steps": None,
            "grid_every_steps": None,
            "checkpoint": {"every_steps": gcd(*steps), "keep_every": gcd(*steps)},
            "augment": augment and dump(augment),
        },
        "sample": {"num_samples": 1000, "sampler": {"type": "heun", "num_steps": 10}, "batch_size": 250},
    }  # fmt: skip
    return parse_experiment(raw, "few")


def written(crops: Shards, number: int, folder: Path) -> Part:
    """Write as many images of each class, in a folder for each; without classes, in one folder. Return the others."""
    of_class = [(name, np.flatnonzero(crops.labels == label)) for label, name in enumerate(crops.classes)]
    others = []
    for name, rows in of_class or [("", np.arange(crops.num_samples))]:
        some, rest = np.split(rows, [number // max(1, crops.num_classes)])
        others.append(rest)
        (folder / name).mkdir(parents=True)
        for place, pixels in zip(some.tolist(), crops.gather(some).permute(0, 2, 3, 1).numpy(), strict=True):
            Image.fromarray(pixels).save(folder / name / f"{place:05}.png")
    return Part(crops, np.concatenate(others))


def drawn(weights: Path, experiment: Experiment, codec: Any, number: int) -> Tensor:
    """Draw a number of samples of all classes, uint8 [N, 3, 32, 32]. codec: decodes them."""
    model = load_model(weights)
    network = model.network.to(best_device())
    make: Any = Generator(network, model.system.reading, model.spec, codec, experiment.section("sample"))  # type: ignore[arg-type, attr-defined]
    seeds, classes = torch.arange(number), model.spec.num_classes
    with torch.no_grad():
        return torch.cat([make(some, some % classes if classes else None).cpu() for some in seeds.split(250)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crops", type=Path)
    parser.add_argument("detector", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numbers", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 1000, 1500], help="the last ends the training")
    parser.add_argument("--augment", type=Augment.model_validate_json, help="settings of train.augment, as JSON")
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant", help="(default: constant)")
    parser.add_argument("--samples", type=int, default=1000, help="samples of each step (default: 1000)")
    parser.add_argument("--start", type=Path, help="weights folder to start from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judge, augment, steps = load_detector(arguments.detector), arguments.augment, arguments.steps
    crops = open_shards(arguments.crops, "train")
    held_out = open_shards(arguments.crops, "validation") if crops.manifest["validation_fraction"] else None
    real = features(judge, held_out or crops)
    start = arguments.start.resolve() if arguments.start else None
    for number in arguments.numbers:
        parts = [str(number), *(["augmented"] if augment else []), *(["started"] if start else [])]
        folder = arguments.folder / "-".join([*parts, f"seed-{arguments.seed}"])
        others = written(crops, number, folder / "images")
        experiment = experiment_of(folder / "images", number, steps, augment, arguments.seed, start, arguments.schedule)
        crop_dataset(experiment.data, folder / "crops")
        (folder / "train.yaml").write_text(to_yaml(dump(train_stage("few", experiment))))
        training = prepare_training(folder / "train.yaml", folder / "crops/manifest.json", None, [])
        run(training.build, training.stage.train, training.model, training.data, folder / "train")
        trained_on = open_shards(folder / "crops", "train")
        for step in steps:
            weights = folder / f"step-{step}"
            tensors, model = weights_at(folder / "train" / "state", folder / "train", step)
            save_weights(weights, tensors, {name: model[name] for name in model if name not in ("format", "sha256")})
            samples = drawn(weights, experiment, training.decoder(), arguments.samples)
            np.savez_compressed(weights / "samples.npz", samples.permute(0, 2, 3, 1).numpy())
            with torch.no_grad():
                distance = frechet_between(judge(samples).features, real)
            copies = find_copies(reduced(samples).features, trained_on, held_out or others)
            share = share_estimate(copies.flagged)
            assert share.interval is not None
            low, high = share.interval
            cells = [f"{trained_on.num_samples:,}", f"{augment.until:g}" if augment else "no", "yes" if start else "no"]
            cells += [str(arguments.seed), f"{step:,}", f"{distance.value:.2f}"]
            measured = f"{share.value:.3f} [{low:.3f}, {high:.3f}]" if copies.threshold is not None else "not measured"
            print(row([*cells, measured]), flush=True)


if __name__ == "__main__":
    main()
