"""The requirement of a synthetic data set stops models trained on few images, which memorise, and lets those trained on
many pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.images.memorization import find_copies, reduced
from image_diffusion.metrics.samples import Samples
from image_diffusion.samplers.ode import Heun
from image_diffusion.synthesis.scorecard import faults, measure_privacy, score_of
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from trained_digits import FLOW, digits

SPEC = DataSpec(channels=1, resolution=16, num_classes=0)
TINY = {
    "depth": 3, "width": 96, "num_heads": 3, "patch": 4, "label_init_std": 0.5,
    "norm": "rms_norm", "qk_norm": True, "mlp": "swiglu", "rope": True,
}  # fmt: skip
OBJECTIVE = {"type": "flow_matching", "prediction": "x0", "loss": "velocity", "label_drop_probability": 0}
REQUIRE = "copies.upper < 0.1 and membership.auc.upper < 0.65"
HELD_OUT, FEW, MANY, MADE = 500, 50, 1297, 300


@cache
def small_digits() -> Tensor:
    """Return the digits as uint8 [N, 1, 16, 16]."""
    pixels, _ = digits()
    return ((F.avg_pool2d(pixels, 2) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def as_samples(images: Tensor) -> Samples:
    return Samples(images.permute(0, 2, 3, 1).contiguous().numpy(), None, [])


def images_of_a_model(train: Tensor, seed: int, steps: int, batch_size: int = 32, rate: float = 3e-3) -> Tensor:
    """Train a tiny DiT on images, uint8 [N, 1, 16, 16]; return MADE images of it."""
    built = parse(DiTSystem, {"type": "dit", "network": TINY, "process": FLOW, "objective": OBJECTIVE}, "system")
    torch.manual_seed(seed)
    network, objective = built.build_network(SPEC), built.build_objective(SPEC)
    optimizer = torch.optim.AdamW(network.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.0)
    x = train.float() / 127.5 - 1
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 3 * (1 - step / steps))
        rows = torch.randint(len(x), (batch_size,), generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
        streams = Streams(seed, torch.full_like(rows, step), rows)
        loss = objective(network, Batch(x[rows], {}, streams, step + 1)).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    settings = SampleConfig(sampler=Heun(num_steps=12), seed=seed)
    codec = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    return Generator(network.eval(), built.reading, SPEC, codec, settings)(torch.arange(MADE), None)


def faults_of(count: int, seed: int, steps: int) -> list[str]:
    """Return the conditions that a model trained on this many images violates."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(small_digits())))
    held_out, train = small_digits()[order[:HELD_OUT]], small_digits()[order[HELD_OUT : HELD_OUT + count]]
    synthetic = as_samples(images_of_a_model(train, seed, steps))
    real = RealImages(as_samples(train), as_samples(held_out))
    copies = find_copies(reduced(synthetic.gather(np.arange(MADE))).features, real.train, real.validation)
    scores: dict[str, Any] = measure_privacy(synthetic, real)
    return faults(scores | {"copies": score_of(share_estimate(copies.flagged), None)}, REQUIRE)


@pytest.mark.slow
@pytest.mark.long
def test_requirement_rejects_memorising_models_and_accepts_others() -> None:
    seeds = 20
    stopped = sum(bool(faults_of(FEW, seed, steps=600)) for seed in range(seeds))
    passed = sum(not faults_of(MANY, seed, steps=600) for seed in range(seeds))
    assert stopped == seeds and passed >= 0.95 * seeds, (stopped, passed)
