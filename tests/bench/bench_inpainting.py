"""Quality of inpainting and of tiles: half-hidden digits of the trained demo, and the seams of tiled photographs.

    snakemake --cores all --config 'experiments=[demo]'
    python tests/bench/bench_inpainting.py halves
    python tests/bench/bench_inpainting.py tiles

Run it where `results` and `config` are. `halves` hides the lower or the right half of held-out digits, has the demo
fill it in by the class of the digit, and asks the demo's own classifier for the class of the result; known pixels are
compared with those of the digit. `tiles` trains a small U-Net on 32 x 32 parts of the two photographs of scikit-learn
and draws pictures of 4 x 4 tiles. Its statistic is the mean difference of neighbouring pixels across the borders of
tiles, over that elsewhere; it is measured in parts of the photographs of the same size, too. Both print tables in
Markdown, with 95% intervals.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.core.process import command
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.features.classifier import load_detector

SIDE, TILES = 32, 4
NUM_PICTURES, NUM_REAL, NUM_PARTS = 32, 2000, 4000
PHOTOGRAPHS: dict[str, Any] = {
    "data": {
        "name": "photographs",
        "source": {"type": "folder", "path": "photographs", "classes": "none"},
        "resolution": SIDE,
        "validation_fraction": 0.05,
    },
    "system": {
        "type": "iddpm",
        "network": {"channels": 32, "multipliers": [1, 2, 2], "num_res_blocks": 1, "attention_resolutions": [8]},
        "process": {"type": "discrete", "schedule": {"type": "cosine"}, "num_timesteps": 1000},
        "objective": {"type": "denoising", "prediction": "v", "variance": "fixed_large", "loss": "simple"},
    },
    "train": {
        "steps": 1000,
        "global_batch": 16,
        "optimizer": {"type": "adamw", "lr": 1.0e-3, "betas": [0.9, 0.99]},
        "schedule": {"type": "cosine", "warmup_steps": 50},
        "grad_clip": 1.0,
        "ema": {"type": "exponential", "rates": [0.99], "warmup": None},
        "validate_every_steps": None,
        "grid_every_steps": None,
        "checkpoint": {"every_steps": 500},
    },
    "sample": {"num_samples": 100, "sampler": {"type": "ddim", "num_steps": 25, "clip_denoised": True}},
    "resources": {"one_job": True, "gpus_per_node": 0, "cpus_per_process": 1},
}


def image_diffusion(*words: str) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "image_diffusion", *words], check=True, stdout=subprocess.DEVNULL)


def drawn(name: str, output: Path, count: int, *changes: str) -> NDArray[np.uint8]:
    """Return what `sample` makes with other settings, uint8 [N, H, W, C]."""
    settings = [word for change in changes for word in ("--set", f"sample.{change}")]
    image_diffusion("sample", name, "--num", str(count), "--output", str(output / "samples.npz"), *settings)
    images: NDArray[np.uint8] = read_arrays(output / "samples.npz")["arr_0"].copy()
    return images


def halves(folder: Path, count: int, options: list[str]) -> None:
    """Hide half of held-out digits, and classify the completed ones by the demo's classifier."""
    digits, judge = (
        open_shards("results/datasets/digits-32/crops", "validation"),
        load_detector(Path("results/datasets/digits-32/detector")),
    )
    count = min(count, digits.num_samples)
    images, labels = digits.gather(np.arange(count)), digits.labels[:count]
    for number, image in enumerate(images):
        path = folder / "holes" / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    masks = {name: np.full((SIDE, SIDE), 255, np.uint8) for name in ("lower", "right")}
    masks["lower"][SIDE // 2 :] = 0
    masks["right"][:, SIDE // 2 :] = 0

    def agreement(found: torch.Tensor) -> str:
        with torch.inference_mode():
            outputs = [judge(part).logits for part in found.split(100)]
        logits = torch.cat([part for part in outputs if part is not None])
        share = share_estimate(logits.argmax(1) == torch.from_numpy(labels))
        assert share.interval is not None
        return f"{share.value:.3f} ({share.interval[0]:.3f} to {share.interval[1]:.3f})"

    classes = "[" + ", ".join(digits.classes[label] for label in labels) + "]"
    print("| Hidden half | Resamplings | Class is right | Class is right, hidden half grey | Known pixels equal |")
    print("| --- | --: | --- | --- | --- |")
    for name, mask in masks.items():
        Image.fromarray(mask).save(folder / f"{name}.png")
        known = torch.from_numpy(mask).bool()
        grey = torch.where(known, images, torch.tensor(128, dtype=torch.uint8))
        for resamplings in (1, 5, 10):
            given = f"given={{images: {folder / 'holes'}, mask: {folder / name}.png, resamplings: {resamplings}}}"
            output = folder / f"{name}-{resamplings}"
            filled = torch.from_numpy(drawn("demo", output, count, f"labels={classes}", given, *options))
            filled = filled.permute(0, 3, 1, 2)
            equal = bool((filled == images)[..., known].all())
            print(f"| {name} | {resamplings} | {agreement(filled)} | {agreement(grey)} | {equal} |", flush=True)
    print(f"\nReal digits: {agreement(images)} of {count}.")


def seam(pictures: NDArray[np.uint8], step: int) -> NDArray[np.float64]:
    """Return the statistic of each picture [N, H, W, C]: the mean difference across the lines where tiles begin or end,
    over that across the others."""
    ratios = []
    for axis in (1, 2):
        differences = np.abs(np.diff(pictures.astype(np.float64), axis=axis)).mean(tuple({1, 2, 3} - {axis}))
        places = np.arange(1, pictures.shape[axis])
        borders = (places % step == 0) | ((places - SIDE) % step == 0)
        ratios.append(differences[:, borders].mean(1) / differences[:, ~borders].mean(1))
    statistic: NDArray[np.float64] = np.stack(ratios).mean(0)
    return statistic


def parts(number: int, side: int, seed: int) -> list[NDArray[np.uint8]]:
    """Return square parts of the photographs, at random places."""
    photographs, draw, made = load_sample_images().images, np.random.default_rng(seed), list[NDArray[np.uint8]]()
    for i in range(number):
        photograph = photographs[i % len(photographs)]
        top, left = (int(draw.integers(length - side + 1)) for length in photograph.shape[:2])
        made.append(photograph[top : top + side, left : left + side])
    return made


def tiles(folder: Path, count: int, options: list[str]) -> None:
    """Draw pictures of tiles, and compare their seams with the same places of photographs."""
    if not Path("results/photographs/train/weights.safetensors").is_file():
        Path("photographs").mkdir(exist_ok=True)
        for number, part in enumerate(parts(NUM_PARTS, SIDE, seed=0)):
            Image.fromarray(part).save(Path("photographs", f"{number:05d}.png"))
        Path("config/experiments/photographs.yaml").write_text(to_yaml(PHOTOGRAPHS))
        target = "results/photographs/train/weights.safetensors"
        words = ["snakemake", "--cores", "1", "--config", "experiments=[photographs]", "--", target]
        subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)
    print("| Overlap | Pictures of tiles | Photographs | 95% of single photographs | Tiles in it | 95% of means |")
    print("| --: | --: | --: | --- | --: | --- |")
    for overlap in (0.5, 0.25, 0.0):
        step = SIDE - int(overlap * SIDE)
        change = f"tiles={{rows: {TILES}, columns: {TILES}, overlap: {overlap}}}"
        made = seam(drawn("photographs", folder / f"tiles-{overlap}", count, change, "batch_size=16", *options), step)
        real = seam(np.stack(parts(NUM_REAL, SIDE + (TILES - 1) * step, seed=1)), step)
        low, high = np.quantile(real, (0.025, 0.975))
        inside = int(((made >= low) & (made <= high)).sum())
        means = real[np.random.default_rng(2).integers(NUM_REAL, size=(10_000, count))].mean(1)
        between = " to ".join(f"{end:.2f}" for end in np.quantile(means, (0.025, 0.975)))
        print(
            f"| {overlap:g} | {made.mean():.3f} | {real.mean():.3f} | {low:.2f} to {high:.2f} | {inside} of {count} | "
            f"{between} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("halves", "tiles"))
    parser.add_argument("--output", type=Path, default=Path("drawn/inpainting"), help="the folder of the images")
    parser.add_argument("--num", type=int, default=None, help="images of each kind")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="a key of the section sample")
    arguments = parser.parse_args()
    if arguments.what == "halves":
        halves(arguments.output, arguments.num or 300, arguments.changes)
    else:
        tiles(arguments.output, arguments.num or NUM_PICTURES, arguments.changes)


if __name__ == "__main__":
    command.run(main)
