"""One project's training step of the same network: what `make peers` runs, each in a process of its own.

    python tests/bench/peers/training.py monai FOLDER

Prints one line of JSON: CPU milliseconds of a step, and the memory that the training adds. The peers train
`DiTTransformer2DModel` of diffusers by their own noise, loss, optimizer, clipping and average; `ours` trains the
product's DiT of the same sizes by the product's loop.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from usage import peak_mib

BATCH, SIDE, CHANNELS, CLASSES = 32, 8, 4, 1000
DEPTH, HEADS, WIDTH, PATCH = 4, 4, 128, 2
STEPS, WARM = 60, 10

Steps = Callable[[int], Any]


def latents() -> tuple[Tensor, Tensor]:
    """A batch and its classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, CHANNELS, SIDE, SIDE, generator=generator)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def ours() -> Steps:
    import bench_train

    bench_train.DEMO = {"depth": DEPTH, "width": WIDTH, "num_heads": HEADS, "patch": PATCH}
    settings = {
        "latent": SIDE,
        "batch": BATCH,
        "microbatch": None,
        "precision": "float32",
        "tf32": False,
        "compile": False,
    }
    return bench_train.ours(argparse.Namespace(**settings), "demo", torch.device("cpu"))


class Network(nn.Module):
    """diffusers' DiT, called as the peers call a network: with times of any range, and classes of its own."""

    channels = out_dim = CHANNELS
    self_condition = random_or_learned_sinusoidal_cond = False

    def __init__(self) -> None:
        super().__init__()
        from diffusers import DiTTransformer2DModel

        self.inner = DiTTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=WIDTH // HEADS,
            in_channels=CHANNELS,
            num_layers=DEPTH,
            sample_size=SIDE,
            patch_size=PATCH,
            num_embeds_ada_norm=CLASSES,
            norm_type="ada_norm_zero",
        )
        self.classes = latents()[1]

    def forward(self, x: Tensor, times: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.inner(x, timestep=times.float(), class_labels=self.classes).sample  # type: ignore[no-any-return]


def looped(
    loss: Callable[[Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Callable[[], Any] = lambda: None,
    clip: Callable[[Iterable[nn.Parameter], float], Any] = nn.utils.clip_grad_norm_,
    backward: Callable[[Tensor], None] = Tensor.backward,
    batch: Callable[[], Tensor] = lambda: latents()[0],
) -> Steps:
    """A training loop from a project's parts. It reads the loss in each step, as their loops do for their bars."""
    kept = list(parameters)

    def steps(count: int) -> None:
        for _ in range(count):
            # A batch arrives as a new tensor from a loader.
            value = loss(batch())
            backward(value)
            clip(kept, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average()
            assert value.item() == value.item()

    return steps


def diffusers() -> Steps:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator, network, noising = Accelerator(cpu=True), Network(), DDPMScheduler(num_train_timesteps=1000)
    average = EMAModel(network.parameters(), decay=0.9999, use_ema_warmup=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=1000)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)

    def loss(x: Tensor) -> Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        return F.mse_loss(network(noising.add_noise(x, noise, times), times), noise)

    def after() -> None:
        schedule.step()
        average.step(network.parameters())

    return looped(loss, network.parameters(), optimizer, after, accelerator.clip_grad_norm_, accelerator.backward)


def denoising_diffusion_pytorch() -> Steps:
    from accelerate import Accelerator
    from denoising_diffusion_pytorch import GaussianDiffusion
    from ema_pytorch import EMA

    accelerator = Accelerator(cpu=True)
    diffusion = GaussianDiffusion(Network(), image_size=SIDE, timesteps=1000, objective="pred_noise")
    average = EMA(diffusion, beta=0.995, update_every=10)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-4, betas=(0.9, 0.99))
    model, optimizer = accelerator.prepare(diffusion, optimizer)
    parameters = model.parameters()
    return looped(model, parameters, optimizer, average.update, accelerator.clip_grad_norm_, accelerator.backward)


def rectified_flow_pytorch() -> Steps:
    from ema_pytorch import EMA
    from rectified_flow_pytorch import RectifiedFlow

    flow = RectifiedFlow(Network(), time_cond_kwarg="times", data_shape=(CHANNELS, SIDE, SIDE))
    average = EMA(flow, forward_method_names=("sample",))
    return looped(flow, flow.parameters(), torch.optim.Adam(flow.parameters(), lr=3e-4), average.update)


def azula() -> Steps:
    from azula.denoise import SimpleDenoiser
    from azula.noise import VPSchedule

    denoiser = SimpleDenoiser(Network(), VPSchedule())
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-4)
    return looped(lambda x: denoiser.loss(x, torch.rand(len(x))), denoiser.parameters(), optimizer)


def monai() -> Steps:
    from monai.inferers import DiffusionInferer
    from monai.networks.schedulers import DDPMScheduler

    network, noising = Network(), DDPMScheduler(num_train_timesteps=1000)
    inferer = DiffusionInferer(noising)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)

    def called(x: Tensor, timesteps: Tensor, context: Any = None) -> Tensor:
        return network(x, timesteps)  # type: ignore[no-any-return]

    def loss(x: Tensor) -> Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        return F.mse_loss(inferer(inputs=x, diffusion_model=called, noise=noise, timesteps=times), noise)

    return looped(loss, network.parameters(), optimizer)


TRAININGS = {
    each.__name__.replace("_", "-"): each
    for each in (ours, diffusers, denoising_diffusion_pytorch, rectified_flow_pytorch, azula, monai)
}


def main() -> None:
    torch.set_num_threads(1)
    before_mib = peak_mib()
    steps = TRAININGS[sys.argv[1]]()
    steps(WARM)
    started = time.process_time()
    steps(STEPS)
    spent_s = time.process_time() - started
    print(json.dumps({"step_ms": 1000 * spent_s / STEPS, "memory_mib": peak_mib() - before_mib}))


if __name__ == "__main__":
    main()
