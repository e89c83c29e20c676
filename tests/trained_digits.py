"""A DiT trained on the bundled digits in a plain loop: compares recipes in seconds, without a workflow."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.sources.scikit_digits import Digits
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.samplers.ode import Heun
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig

SPEC = DataSpec(channels=1, resolution=32, num_classes=10)
PATCHES_OF_16 = {"depth": 4, "width": 128, "num_heads": 4, "patch": 16, "label_init_std": 0.5}
JIT = {
    "norm": "rms_norm", "qk_norm": True, "mlp": "swiglu", "rope": True,
    "patch_bottleneck": 32, "class_tokens": 4, "class_tokens_from": 1,
}  # fmt: skip
FLOW = {"type": "flow", "times": {"type": "logit_normal"}, "time_scale": 1000}


@dataclass(frozen=True)
class Trained:
    """agreement: share of samples that show the requested digit. error: mean squared difference of a sample's pixels
    from the nearest digit. cpu_s: of the training alone."""

    agreement: float
    error: float
    cpu_s: float


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the 1,797 digits as float32 [N, 1, 32, 32] in [-1, 1], and their labels, int64 [N]."""
    source = Digits()
    items = source.listing().items
    pixels = [np.asarray(Image.open(io.BytesIO(source.read(item))).convert("L")) for item in items]
    x = torch.from_numpy(np.stack(pixels)).float()[:, None] / 127.5 - 1
    return x, torch.tensor([item.label for item in items])


def train(
    steps: int,
    batch_size: int = 64,
    rate: float = 2e-3,
    seed: int = 0,
    num_samples: int = 300,
    guidance: float = 2.0,
    **system: Any,
) -> Trained:
    """Train a system, given by keys such as `objective`, at a rate that rises and falls, then evaluate samples of its
    average weights by the digits nearest to them."""
    from sklearn.neighbors import KNeighborsClassifier

    parts = {"type": "dit", "network": PATCHES_OF_16, "process": FLOW} | system
    built = parse(DiTSystem, parts, "system")
    torch.manual_seed(seed)
    network = built.build_network(SPEC)
    objective = built.build_objective(SPEC)
    x, labels = digits()
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(network.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.0)
    began = time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 3 * (1 - step / steps))
        rows = torch.randint(len(x), (batch_size,), generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
        streams = Streams(seed, torch.full_like(rows, step), rows)
        loss = objective(network, Batch(x[rows], {"label": labels[rows]}, streams, step + 1)).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(network)
    cpu_s = time.process_time() - began

    settings = SampleConfig(sampler=Heun(num_steps=15), guidance=Guidance(guidance_scale=guidance))
    codec = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    asked = torch.arange(num_samples) % 10
    made = Generator(average.module.eval(), built.reading, SPEC, codec, settings)(torch.arange(num_samples), asked)
    sample = made[:, :1].float() / 127.5 - 1
    seen = KNeighborsClassifier(3).fit(_small(x), labels.numpy()).predict(_small(sample))
    error = torch.cdist(sample.flatten(1), x.flatten(1)).square().min(1).values.mean().item() / x[0].numel()
    return Trained(float((seen == asked.numpy()).mean()), error, cpu_s)


def _small(x: Tensor) -> np.ndarray[Any, Any]:
    """Return [N, 1, 32, 32] as the 8 x 8 means in which the digits were published, [N, 64]."""
    return torch.nn.functional.avg_pool2d(x, 4).flatten(1).numpy()
