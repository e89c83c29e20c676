"""The value of weights of other classes: digits 5 to 9 from weights trained on 0 to 4, and from random weights.

    python tests/bench/bench_finetune.py --seeds 3

Runs finetune_base once, and for each seed finetune_demo, and the same from random weights for twice as many steps.
Labels of 100 samples are read by a support vector machine on pixels, trained on the real crops. Figures in
docs/finetuning.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.svm import SVC

from image_diffusion.core.config.base import dump, merged, read_yaml, to_yaml
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import train_stage
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run

_SAMPLES = 100
CONFIG = Path(__file__).parents[2] / "config" / "experiments"


def experiment(name: str, **changes: Any) -> Experiment:
    raw = read_yaml(CONFIG / f"{name}.yaml")
    return parse_experiment(raw | {"train": merged(raw["train"], changes)}, name)


def trained(found: Experiment, folder: Path, crops: Path, start: Path | None) -> Path:
    """Train an experiment and return its folder of weights."""
    config = folder / "train.yaml"
    folder.mkdir(parents=True)
    config.write_text(to_yaml(dump(train_stage(folder.name, found))))
    training = prepare_training(config, crops / "manifest.json", None)
    run(training.build, training.stage.train, training.model, training.data, folder / "train", start=start)
    return folder / "train"


def agreement(found: Experiment, weights: Path, judge: SVC) -> float:
    """Return the share of samples in which the judge sees the requested class."""
    model, settings = load_model(weights), found.section("sample")
    seeds = torch.arange(_SAMPLES)
    labels = seeds % len(model.classes)
    codec = load_codec(model, None, torch.device("cpu"))
    images = Generator(model.network, model.system.reading, model.spec, codec, settings)(seeds, labels)  # type: ignore[arg-type]
    return float((judge.predict(images.flatten(1).numpy()) == labels.numpy()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base", type=Path, help="weights folder of finetune_base, where it is trained already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        base, tuned = experiment("finetune_base"), experiment("finetune_demo")
        for each, name in ((base, "low"), (tuned, "high")):
            crop_dataset(each.data, root / name)
        splits = [open_shards(root / "high", split) for split in ("train", "validation")]
        pixels = [split.gather(np.arange(split.num_samples)).flatten(1).numpy() for split in splits]
        judge = SVC(C=10).fit(pixels[0], splits[0].labels)
        print(f"judge on held-out digits: {judge.score(pixels[1], splits[1].labels):.3f}", flush=True)
        start = arguments.base or trained(base, root / "base", root / "low", None)
        steps = tuned.train.steps
        for seed in range(arguments.seeds):
            row = {}
            for name, length, from_base in (("tuned", steps, True), ("anew", 2 * steps, False)):
                changes = {} if from_base else {"init_from": None, "optimizer": {"lr": base.train.optimizer.lr}}
                found = experiment("finetune_demo", seed=seed, steps=length, **changes)
                folder = root / f"{name}-{length}-{seed}"
                weights = trained(found, folder, root / "high", start if from_base else None)
                row[f"{name} {length}"] = agreement(found, weights, judge)
            print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
