"""RIN is known to diverge late in training: the shipped recipe, on a tiny network, stays finite for 20,000 steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.parallel.flat_parameters import Flat

RECIPE = Path(__file__).parents[2] / "config" / "experiments" / "rin_imagenet64.yaml"
TINY = {"width": 8, "patch": 4, "depth": 1, "num_latents": 4, "latent_width": 8, "latent_depth": 1, "head_width": 8}
SPEC = DataSpec(channels=3, resolution=8, num_classes=3)


def test_the_shipped_recipe_stays_finite(request: pytest.FixtureRequest) -> None:
    """20,000 steps with --soak, 100 without, at ten times the learning rate."""
    torch.manual_seed(0)
    num_steps = 20_000 if request.config.getoption("--soak") else 100
    sections = yaml.safe_load(RECIPE.read_text())
    sections["system"]["network"] |= TINY
    system: RinSystem = parse(RinSystem, sections["system"], "system")
    train: TrainConfig = parse(TrainConfig, sections["train"], "train")
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    flat = Flat(network)
    optimizer = train.optimizer.build(flat)
    optimizer.set_rate(10)
    assert train.grad_clip is not None
    ids = torch.arange(64)
    coarse = Streams(0, torch.zeros_like(ids), ids).normal("images", (3, 2, 2))
    images = torch.tanh(nn.functional.interpolate(coarse, scale_factor=4))
    history = []
    for step in range(num_steps):
        rows = (ids[:8] + 8 * step) % 64
        batch = Batch(images[rows], {"label": rows % 3}, Streams(1, torch.full_like(rows, step // 8), rows))
        flat.gradient.zero_()
        losses = objective(network, batch)
        losses.loss.mean().backward()  # type: ignore[no-untyped-call]
        norm = torch.linalg.vector_norm(flat.gradient)
        flat.gradient.mul_((train.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.torch.step()
        history.append(torch.stack([losses.loss.detach().mean(), norm, losses.parts["latent_norm"].mean()]))
    loss, norms, latent_norms = torch.stack(history).unbind(1)
    for name, values in {"loss": loss, "gradient norm": norms, "latent norm": latent_norms}.items():
        print(f"{name}: first 50 {values[:50].mean():.3f}, last 50 {values[-50:].mean():.3f}, most {values.max():.3f}")
    assert torch.stack(history).isfinite().all()
    assert loss[-50:].mean() < 1.1 * loss[:50].mean()
    assert norms.max() < 100
    assert latent_norms.max() < 100
