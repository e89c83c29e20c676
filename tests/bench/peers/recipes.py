"""One project's published recipe on images, in the environment of the peers: what `reaching.py` runs.

    python tests/bench/peers/recipes.py diffusers images.npy SEED WEIGHTS SAMPLES SECONDS

Trains for that many CPU seconds, writes samples to NAME.npy beside the images (uint8 [N, C, H, W]), and prints one line
of JSON with the steps and CPU seconds of the training.

Network, batch, learning rate, average, loss and sampler are those of a project's own example, with two changes. The
width of its U-Net is divided by the power of two that brings it nearest to the given number of weights, and a schedule
of the learning rate is shortened to the training. Images are drawn from memory, mirrored at random where the file is
called `mirrored.npy`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import Steps, looped

Sample = Callable[[int], Tensor]
"""Images in [0, 1], of the weights that the project samples with. [N, C, H, W]."""


@dataclass
class Images:
    """pixels: float32 [N, C, H, W] in [0, 1]. weights: about how many a network may have. done: share of the training
    that is over."""

    pixels: Tensor
    is_mirrored: bool
    weights: int
    done: float = 0.0

    def batches(self, size: int) -> Callable[[], Tensor]:
        """Batches of images in random order, epoch by epoch. Float32 [size, C, H, W]."""
        order: list[int] = []

        def batch() -> Tensor:
            while len(order) < size:
                order.extend(torch.randperm(len(self.pixels)).tolist())
            x = self.pixels[[order.pop() for _ in range(size)]]
            if self.is_mirrored:
                x = torch.where(torch.rand(size, 1, 1, 1) < 0.5, x.flip(-1), x)
            return x

        return batch

    def narrowed(self, network: Callable[[int], nn.Module]) -> nn.Module:
        """A network of the width whose number of weights is nearest. network: of a divisor."""
        sizes = {}
        for divisor in (1, 2, 4, 8, 16, 32):
            with torch.device("meta"):
                try:
                    made = network(divisor)
                except (ValueError, AssertionError):
                    break
            sizes[divisor] = sum(each.numel() for each in made.parameters())
        nearest = min(sizes, key=lambda divisor: abs(math.log(sizes[divisor] / self.weights)))
        print(f"{sizes[nearest]:,} weights: width / {nearest}", file=sys.stderr)
        return network(nearest)


def diffusers(images: Images) -> tuple[Steps, Sample]:
    """`examples/unconditional_image_generation/train_unconditional.py` with the settings of its README."""
    from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    channels, side = images.pixels.shape[1:3]

    def network_of(divisor: int) -> nn.Module:
        widths = [width // divisor for width in (128, 128, 256, 256, 512, 512)]
        down = ["DownBlock2D"] * 4 + ["AttnDownBlock2D", "DownBlock2D"]
        up = ["UpBlock2D", "AttnUpBlock2D"] + ["UpBlock2D"] * 4
        return UNet2DModel(  # type: ignore[no-any-return]
            sample_size=side,
            in_channels=channels,
            out_channels=channels,
            layers_per_block=2,
            block_out_channels=widths,
            down_block_types=down,
            up_block_types=up,
            norm_num_groups=min(32, widths[0]),
        )

    network, noising = images.narrowed(network_of), DDPMScheduler(num_train_timesteps=1000)
    average = EMAModel(network.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    size, epochs, warmup = 16, 100, 500
    share = warmup * size / (epochs * len(images.pixels))

    def rate(_: int) -> float:
        return (
            min(1.0, images.done / share) * 0.5 * (1 + math.cos(math.pi * max(0.0, images.done - share) / (1 - share)))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def loss(x: Tensor) -> Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        return F.mse_loss(network(noising.add_noise(2 * x - 1, noise, times), times).sample, noise)

    def after() -> None:
        schedule.step()
        average.step(network.parameters())

    def sample(count: int) -> Tensor:
        sampler = DDIMScheduler.from_config(noising.config)
        sampler.set_timesteps(SAMPLER_STEPS)
        average.store(network.parameters())
        average.copy_to(network.parameters())
        x = torch.randn(count, channels, side, side)
        for time_of in sampler.timesteps:
            x = sampler.step(network(x, time_of).sample, time_of, x).prev_sample
        average.restore(network.parameters())
        return (x + 1) / 2

    return looped(loss, network.parameters(), optimizer, after, batch=images.batches(size)), sample


def denoising_diffusion_pytorch(images: Images) -> tuple[Steps, Sample]:
    """The `Trainer` of its README. Its two batches of 32 a step are one of 64."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet
    from ema_pytorch import EMA

    channels, side = images.pixels.shape[1:3]
    network = images.narrowed(lambda divisor: Unet(dim=64 // divisor, dim_mults=(1, 2, 4, 8), channels=channels))
    diffusion = GaussianDiffusion(network, image_size=side, timesteps=1000, sampling_timesteps=SAMPLER_STEPS)
    average = EMA(diffusion, beta=0.995, update_every=10)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    steps = looped(diffusion, diffusion.parameters(), optimizer, average.update, batch=images.batches(64))
    return steps, lambda count: average.ema_model.sample(batch_size=count)


def rectified_flow_pytorch(images: Images) -> tuple[Steps, Sample]:
    """The `Trainer` of its README."""
    from ema_pytorch import EMA
    from rectified_flow_pytorch import RectifiedFlow, Unet

    channels = images.pixels.shape[1]
    network = images.narrowed(lambda divisor: Unet(dim=64 // divisor, channels=channels))
    flow = RectifiedFlow(network, data_shape=tuple(images.pixels.shape[1:]))
    average = EMA(flow, forward_method_names=("sample",))
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-4)

    def clip(parameters: object, _: float) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5)  # type: ignore[arg-type]

    steps = looped(flow, flow.parameters(), optimizer, average.update, clip, batch=images.batches(16))
    return steps, lambda count: average.sample(batch_size=count)


SAMPLER_STEPS = 32
"""Of DDIM. It counts for nothing: sampling is not timed."""

RECIPES = {
    each.__name__.replace("_", "-"): each for each in (diffusers, denoising_diffusion_pytorch, rectified_flow_pytorch)
}


def main() -> None:
    name, path, seed, weights, samples, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    images = Images(torch.from_numpy(np.load(path)).float() / 255, Path(path).stem == "mirrored", int(weights))
    steps, sample = RECIPES[name](images)
    began, spent_s, done = time.process_time(), 0.0, 0
    while spent_s < float(seconds):
        steps(10)
        spent_s, done = time.process_time() - began, done + 10
        images.done = min(1.0, spent_s / float(seconds))
    with torch.no_grad():
        parts = [sample(100).clamp(0, 1) for _ in range(int(samples) // 100)]
    np.save(Path(path).with_name(f"{name}.npy"), (torch.cat(parts) * 255).round().to(torch.uint8).numpy())
    print(json.dumps({"steps": done, "cpu_s": spent_s}))


if __name__ == "__main__":
    main()
