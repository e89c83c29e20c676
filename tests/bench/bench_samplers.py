"""Samplers side by side on a trained model: quality and seconds against the number of network calls.

    python tests/bench/bench_samplers.py --experiment results/demo --codec results/demo_codec \\
        --data results/datasets/digits-32

Those are the defaults: `make demo` first. Prints a table in Markdown. Every sampler makes the same number of images,
from the same seeds, with the guidance of the experiment; quality is the kernel distance (unbiased), the Fréchet
distance and the label agreement of the embedded detector. Time is that of the processor, medians over hundreds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from image_diffusion.core.devices import best_device
from image_diffusion.core.process import command
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.samples import Samples
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.base import SamplerConfig
from image_diffusion.samplers.ode import DpmSolver, Euler, Heun, UniPc
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.generator import Generator, requested_labels
from image_diffusion.training.load_model import load_codec, load_model

CALLS = (5, 10, 25, 50)


def samplers(calls: int, adds_noise: bool) -> dict[str, SamplerConfig]:
    """Return the samplers that use about this many calls of the network; Heun's method uses two a step."""
    found: dict[str, SamplerConfig] = {
        "ddim": Ddim(num_steps=calls),
        "euler": Euler(num_steps=calls),
        "heun": Heun(num_steps=(calls + 1) // 2),
        "dpm_solver": DpmSolver(num_steps=calls),
        "unipc": UniPc(num_steps=calls),
    }
    return {"ddpm": Ddpm(num_steps=calls), **found} if adds_noise else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=Path("results/demo"))
    parser.add_argument(
        "--codec", type=Path, default=Path("results/demo_codec"), help="folder of the experiment that trained the codec"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("results/datasets/digits-32"), help="folder with crops and detector"
    )
    parser.add_argument("--num-samples", type=int, default=300)
    arguments = parser.parse_args()

    device = best_device()
    model = load_model(arguments.experiment / "train")
    codec = load_codec(model, arguments.codec / "train", device)
    sections, config = model.system.sections, arguments.experiment / "config"
    settings = load_sections(config / "sample.yaml", ["sample"], sections)["sample"]
    judge = load_sections(config / "evaluate.yaml", ["evaluate"], sections)["evaluate"]
    judge = judge.model_copy(update={"two_sample": False, "copies": False})
    crops = arguments.data / "crops"
    data = RealImages(open_shards(crops, "train"), open_shards(crops, "validation"))
    detector = judge.detectors[0].build(arguments.data / "detector", str(device))
    assert isinstance(model.system, DiffusionSystem)
    adds_noise = model.system.process.type != "flow"

    seeds = torch.arange(arguments.num_samples)
    labels = requested_labels("balanced", model.classes, seeds)
    print("| Sampler | Calls | Kernel distance | Fréchet distance | Label agreement | CPU seconds for 100 images |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for calls in CALLS:
        for name, sampler in samplers(calls, adds_noise).items():
            chosen = settings.model_copy(update={"sampler": sampler})
            generator = Generator(model.network.to(device), model.system.reading, model.spec, codec, chosen)
            images, seconds = [], []
            for start in range(0, len(seeds), 100):
                rows = slice(start, start + 100)
                began = time.process_time()
                images.append(generator(seeds[rows], None if labels is None else labels[rows]))
                seconds.append(time.process_time() - began)
            array = torch.cat(images).permute(0, 2, 3, 1).numpy()
            made = Samples(array, None if labels is None else labels.numpy(), model.classes)
            found = evaluate_samples(made, data, [detector], judge)["metrics"]
            kd, fd, agreement = (found.get(f"inpipe_{key}", {}).get("value") for key in ("kd", "fd", "agreement"))
            print(
                f"| {name} | {calls} | {kd:.4f} | {fd:.3f} | {'' if agreement is None else f'{agreement:.3f}'} | "
                f"{statistics.median(seconds):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    command.run(main)
