"""Sampling from images: from a known part of each (inpainting), or from the whole image with added noise.

Lugmayr et al. 2022, "RePaint: Inpainting using denoising diffusion probabilistic models", Algorithm 1. Its lines 5 and
8 put a noisy form of the known pixels into every x_s. Here the known x0 replaces the prediction of x0 where it exists,
so that the sampler's own step draws that noisy form: with any sampler it has the same distribution at each level, and
no sampler's rule changes. Meng et al. 2022, "SDEdit: Guided image synthesis and editing with stochastic differential
equations": sampling starts at a middle noise level, from an image with that much noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.samplers.base import SamplerConfig, Step, initial_scale


class Inpainting(Config):
    """Images with a known part, which is kept; sampling fills in the rest."""

    images: str = Field(min_length=1)
    """Folder of images, or one image, cropped as the data set's are. Seed s takes image s modulo their number, in the
    order of their names."""
    mask: str = Field(min_length=1)
    """One mask for all images, or a folder with a mask for each, of the same name except for the suffix. White pixels
    are known, black ones are filled in. A mask has the size of its image and is cropped like it."""
    resamplings: int = Field(10, ge=1)
    """Number of times that each step is taken, with its noise added again in between, so that the filled part agrees
    better with the known part. Lugmayr et al. (2022) use 10. The sampling time is multiplied by this number."""


class Start(Config):
    """Images that sampling starts from instead of noise."""

    images: str = Field(min_length=1)
    """Folder of images, or one image, cropped as the data set's are. Seed s takes image s modulo their number, in the
    order of their names."""
    strength: float = Field(0.6, ge=0, le=1)
    """Share of the sampler's steps that are taken: the last ones. 0 returns the image; 1 keeps nothing of it."""


@dataclass(frozen=True)
class FromImages:
    """Sampling of a batch from images, or from noise if there are none. start: x0 [B, ...] that sampling starts from,
    with `strength`. known: x0 [B, ...], known where `mask`, bool [B, 1, ...], is true, with `resamplings`.
    """

    start: Tensor | None = None
    strength: float = 1.0
    known: Tensor | None = None
    mask: Tensor | None = None
    resamplings: int = 1

    def sample(self, sampler: SamplerConfig, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams) -> Tensor:
        """Sample x0 [B, ...], as a call of the sampler does. Its known part is exact."""
        x = noise if self.start is None else self.start
        for step in self.trajectory(sampler, denoiser, grid, noise, streams):
            x = step.x / grid.alpha[-1].item()
        return x if self.known is None or self.mask is None else torch.where(self.mask, self.known, x)

    def trajectory(
        self, sampler: SamplerConfig, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams
    ) -> Iterator[Step]:
        """Sample one step at a time, as the sampler's `trajectory` does."""
        first = first_point(grid, self.strength)
        if first == grid.num_steps:
            return
        if self.start is not None and first > 0:
            grid, denoiser = grid.starting_at(first), _shifted(denoiser, first)
            noise = _noisy(self.start, grid, noise)
        if self.known is not None and self.mask is not None:
            denoiser = with_known(denoiser, grid, self.known, self.mask)
            noise = torch.where(self.mask, _noisy(self.known, grid, noise), noise)
        if self.resamplings == 1:
            yield from sampler.trajectory(denoiser, grid, noise, streams)
        else:
            yield from _resampled(sampler, denoiser, grid, noise, streams, self.resamplings)


def first_point(grid: Grid, strength: float) -> int:
    """Return the point of a grid at which sampling starts: point 0 for strength 1, the last point for strength 0."""
    return grid.num_steps - int(strength * grid.num_steps + 0.5)


def with_known(denoiser: Denoiser, grid: Grid, known: Tensor, mask: Tensor) -> Denoiser:
    """Return the denoiser with the known x0, and the values that follow from it, where `mask` is true."""
    alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()

    def denoiser_with_known(x: Tensor, i: int) -> Denoised:
        denoised, step = denoiser(x, i), grid.steps.at(i, x)
        mean, log_variance = denoised.mean, denoised.log_variance
        return Denoised(
            x0=torch.where(mask, known, denoised.x0),
            eps=torch.where(mask, (x - alphas[i] * known) / sigmas[i], denoised.eps),
            log_variance=None if log_variance is None else torch.where(mask, step.log_variance, log_variance),
            mean=None if mean is None else torch.where(mask, step.posterior_mean(known, x), mean),
        )

    return denoiser_with_known


def _noisy(x0: Tensor, grid: Grid, noise: Tensor) -> Tensor:
    """Return x_t at a grid's first point, divided by `initial_scale`, by which samplers multiply it."""
    return (grid.alpha[0].item() * x0 + grid.sigma[0].item() * noise) / initial_scale(grid)


def _shifted(denoiser: Denoiser, first: int) -> Denoiser:
    return lambda x, i: denoiser(x, first + i)


def _resampled(
    sampler: SamplerConfig, denoiser: Denoiser, grid: Grid, noise: Tensor, streams: Streams, resamplings: int
) -> Iterator[Step]:
    """Take every step but the last several times, each time from noise that is added again (line 9 of Algorithm 1).

    Each step is the first one of a new run of the sampler, so samplers that use earlier predictions take steps of first
    order.
    """
    x = initial_scale(grid) * noise
    alphas, sigmas = grid.alpha.tolist(), grid.sigma.tolist()
    for i in range(grid.num_steps):
        rest, last = grid.starting_at(i), i == grid.num_steps - 1
        for repeat in range(1 if last else resamplings):
            own = streams.fork(f"resampling {i} {repeat}")
            if repeat > 0:  # x_t ~ q(x_t | x_s)
                ratio = alphas[i] / alphas[i + 1]
                variance = max(sigmas[i] ** 2 - ratio**2 * sigmas[i + 1] ** 2, 0.0)
                x = ratio * x + variance**0.5 * own.normal("added_again", tuple(x.shape[1:])).to(x)
            step = next(sampler.trajectory(_shifted(denoiser, i), rest, x / initial_scale(rest), own))
            x = step.x
        yield step
