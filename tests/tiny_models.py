"""Tiny folders of weights."""

from __future__ import annotations

from pathlib import Path

import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import write_text
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.images.reconstruction import Lpips, LpipsConfig
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import SampleConfig


def write_model(experiment: Path, step: int, seed: int = 0) -> None:
    """Write the files that a training of a tiny DiT leaves in results/<experiment>, and its sampling settings."""
    torch.manual_seed(seed)
    system = DiTSystem(network=DiTConfig(depth=1, width=16, num_heads=2, patch=4))
    spec = DataSpec(channels=3, resolution=8, num_classes=2)
    network = system.build_network(spec)
    described = {
        "system": dump(system),
        "spec": dump(spec),
        "codec": {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None},
        "classes": ["dark", "light"],
        "step": step,
        "examples_seen": 64 * step,
        "ema": None,
    }
    save_weights(experiment / "train", network.state_dict(), described)
    sampling = SampleConfig(sampler=Ddim(num_steps=2), batch_size=2)
    write_text(experiment / "config" / "sample.yaml", to_yaml({"sample": dump(sampling)}))


def lpips_files(folder: Path) -> LpipsConfig:
    """Write an AlexNet of random weights under torchvision's names, and heads under those of the package lpips."""
    generator = torch.Generator().manual_seed(0)
    measure = Lpips()
    backbone = {}
    for place, layer in zip((0, 3, 6, 8, 10), measure.convolutions, strict=True):
        spread = layer.weight[0].numel() ** -0.5
        backbone[f"features.{place}.weight"] = torch.randn(layer.weight.shape, generator=generator) * spread
        backbone[f"features.{place}.bias"] = torch.randn(layer.weight.shape[:1], generator=generator) * 0.1
    heads = {
        f"lin{number}.model.1.weight": torch.rand(head.shape, generator=generator).view(1, -1, 1, 1)
        for number, head in enumerate(measure.heads)
    }
    torch.save(backbone, folder / "alexnet.pth")
    torch.save(heads, folder / "alex.pth")
    return LpipsConfig(backbone=folder / "alexnet.pth", heads=folder / "alex.pth")
