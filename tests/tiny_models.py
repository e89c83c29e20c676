"""Weights folders that are as small as they get."""

from __future__ import annotations

from pathlib import Path

import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config import dump, to_yaml
from image_diffusion.core.files import write_text
from image_diffusion.core.types import DataSpec
from image_diffusion.core.weights import save_weights
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.samplers.ddim import Ddim
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.dit import DiTSystem


def write_model(experiment: Path, step: int, seed: int = 0) -> None:
    """What a training of a tiny DiT leaves in results/<experiment>, and how it is sampled."""
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
