"""Random numbers of each image, which do not depend on the batch, the device or the order of images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams


def image_streams(seeds: Tensor, seed: int = 0) -> Streams:
    """Return the streams of images to be made. seeds: int64 [B], one per image; seed: shared by all."""
    return Streams(seed=seed, epoch=torch.zeros_like(seeds), sample=seeds)


def initial_noise(streams: Streams, shape: tuple[int, ...]) -> Tensor:
    """Draw the initial noise of images, float32 [B, *shape], standard normal: x = sigma_0 * noise."""
    return streams.normal("initial_noise", shape)


def step_noise(streams: Streams, step: int, x: Tensor) -> Tensor:
    """Draw standard normal numbers in the shape and type of x [B, ...], which step number `step` adds to the images."""
    return at_step(streams, step).normal("sampler", tuple(x.shape[1:])).to(x)


def at_step(streams: Streams, step: int) -> Streams:
    """Return the streams of a step, one for each image."""
    return replace(streams, epoch=torch.full_like(streams.sample, step))
