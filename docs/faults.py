"""Plant faults in the demo and draw what its samples look like, for docs/troubleshooting.md.

    make demo && python docs/faults.py . docs/images/faults

Takes the folder in which the demo has run, and trains small variants of it there: five minutes of one core. Two faults
that the package refuses are planted in the loaded model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.load_model import load_model

ROOT = Path(__file__).resolve().parents[1]
SAMPLED = {
    "sampling_steps": ["sample.sampler.num_steps=2"],
    "guidance_strong": ["sample.guidance.guidance_scale=40"],
    "guidance_none": ["sample.guidance.guidance_scale=0"],
}
"""Pictures of the demo's own weights, by the settings that spoil them."""
TRAINED = {
    "training_short": "base: demo\ntrain: {steps: 80, ema: {rates: [0.9]}}\n",
    "learning_rate": "base: demo\ntrain: {steps: 200, grad_clip: null, optimizer: {lr: 0.2}}\n",
    "codec": "base: demo\ncodec: {experiment: poor_codec}\n",
    "copies": "base: jit_demo\ndata: {name: fifty, source: {type: folder, path: fifty}, num_shards: 1}\n"
    "train: {steps: 1500, global_batch: 20}\n",
}
"""Experiments, by the picture."""
CODEC = "base: demo_codec\ntrain: {steps: 20, ema: {rates: [0.5]}}\n"


def strip(images: NDArray[np.uint8], path: Path) -> None:
    """Draw images [20, H, W, C] in two rows of ten, twice as large."""
    rows = [np.concatenate(list(row), axis=1) for row in images[:20].reshape(2, 10, *images.shape[1:])]
    picture = Image.fromarray(np.concatenate(rows, axis=0))
    large = picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST)
    large.quantize(64).save(path, optimize=True)


def sampled(project: Path, experiment: str, changes: list[str]) -> NDArray[np.uint8]:
    """Twenty images of a trained experiment. Uint8 [20, H, W, C]."""
    settings = [word for change in changes for word in ("--set", change)]
    line = [sys.executable, "-m", "image_diffusion", "sample", experiment, "--num", "20", *settings]
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "samples.npz"
        subprocess.run([*line, "--output", str(output)], cwd=project, check=True)
        images: NDArray[np.uint8] = read_arrays(output)["arr_0"][:]
    return images


def trained(project: Path, name: str) -> None:
    """Train an experiment with what it needs."""
    line = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]
    target = f"results/{name}/train/weights.safetensors"
    subprocess.run([*line, target, "--config", f"experiments=[{name}]"], cwd=project, check=True)


class Spoilt:
    """A codec that decodes other latents than it is given."""

    def __init__(self, codec: Any, latents: Callable[[Tensor], Tensor]) -> None:
        self._codec, self._latents = codec, latents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, x: Tensor) -> Any:
        """Return the images of other latents."""
        return self._codec.decode(self._latents(x))


def spoilt(project: Path, weights: Callable[[Tensor], Tensor], latents: Callable[[Tensor], Tensor]) -> Any:
    """Twenty images of the demo's model with other weights, or other latents at its decoder. Uint8 [20, H, W, C]."""
    folder, weights_of_codec = project / "results" / "demo", project / "results" / "demo_codec" / "train"
    manifest = next((project / "results" / "datasets").glob("digits-32/demo_codec*/manifest.json"))
    training = prepare_training(folder / "config" / "train.yaml", manifest, weights_of_codec / "weights.safetensors")
    model, codec = load_model(folder / "train"), Spoilt(training.decoder(), latents)
    torch.manual_seed(0)
    for parameter in model.network.parameters():
        parameter.data = weights(parameter.data)
    settings = load_experiment(project / "config" / "experiments" / "demo.yaml").section("sample")
    generator: Any = Generator(model.network, model.system.reading, model.spec, codec, settings)
    with torch.no_grad():
        return generator(torch.arange(20), torch.arange(20) % 10).permute(0, 2, 3, 1).numpy()


def fifty(project: Path) -> NDArray[np.uint8]:
    """Write five training images of each digit as a folder, and return them. Uint8 [50, H, W, C]."""
    crops = open_shards(project / "results" / "datasets" / "digits-32" / "crops", "train")
    chosen = np.concatenate([np.flatnonzero(crops.labels == digit)[:5] for digit in range(10)])
    images: NDArray[np.uint8] = crops.gather(chosen).permute(0, 2, 3, 1).numpy()
    for number, (image, label) in enumerate(zip(images, crops.labels[chosen], strict=True)):
        path = project / "fifty" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return images


def nearest(images: NDArray[np.uint8], training: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Ten samples, and below each the training image that is nearest in pixels. Uint8 [20, H, W, C]."""
    above, known = images[:10].astype(float), training.astype(float)
    distances = ((above[:, None] - known[None]) ** 2).sum(axis=(2, 3, 4))
    return np.concatenate([images[:10], training[distances.argmin(axis=1)]])


def main() -> None:
    project, pictures = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    pictures.mkdir(parents=True, exist_ok=True)
    strip(sampled(project, "demo", []), pictures / "none.png")
    for name, changes in SAMPLED.items():
        strip(sampled(project, "demo", changes), pictures / f"{name}.png")
    strip(spoilt(project, lambda weight: weight, lambda x: 0.4 * x), pictures / "latent_scale.png")
    strip(
        spoilt(project, lambda weight: weight + 0.05 * torch.randn_like(weight), lambda x: x), pictures / "average.png"
    )
    training, files = fifty(project), project / "config" / "experiments"
    (files / "poor_codec.yaml").write_text(CODEC)
    for name, text in TRAINED.items():
        (files / f"{name}.yaml").write_text(text)
        trained(project, name)
        images = sampled(project, name, [])
        strip(nearest(images, training) if name == "copies" else images, pictures / f"{name}.png")


if __name__ == "__main__":
    main()
