"""Inpainting, image-to-image and tiled sampling with every sampler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import image_streams, initial_noise
from image_diffusion.process import Process
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow
from image_diffusion.process.tiles import Tiles
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.base import SamplerConfig
from image_diffusion.samplers.from_images import FromImages, with_known
from image_diffusion.samplers.ode import DpmSolver, Euler, FlowMap, Heun, UniPc
from image_diffusion.samplers.sde import Sde

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own

SHAPE = (3, 4, 4)
SEEDS = torch.tensor([3, 1, 2**33])
CASES: list[tuple[SamplerConfig, Process]] = [
    (Ddpm(num_steps=6), Discrete()),
    (Ddpm(num_steps=6, variance="fixed_large", clip_denoised=True), Continuous(scale=0.5)),
    (Ddpm(num_steps=6, time_difference=0.1), Continuous()),
    (Ddim(num_steps=6), Discrete()),
    (Ddim(num_steps=6, eta=0.7), Discrete()),
    (Euler(num_steps=6), Flow()),
    (Heun(num_steps=6), Edm()),
    (DpmSolver(num_steps=6), Discrete()),
    (DpmSolver(num_steps=6, adds_noise=True), Flow()),
    (UniPc(num_steps=6), Discrete()),
    (Sde(num_steps=6), Flow()),
    (FlowMap(num_steps=4), Flow()),
]
every = pytest.mark.parametrize(("sampler", "process"), CASES, ids=lambda part: part.type)
RIGHT = torch.arange(4) >= 2  # the right half is known
MASK = RIGHT.expand(len(SEEDS), 1, 4, 4)


def toy(grid: Grid) -> Denoiser:
    """A denoiser: x0 = 0.4 x_t + 0.1 with x_t averaged over the image, and the resulting eps."""

    def denoiser(x: Tensor, i: int) -> Denoised:
        x0 = 0.4 * x.mean((2, 3), keepdim=True) + 0.1 + 0 * x
        return Denoised(x0, (x - grid.alpha[i].item() * x0) / grid.sigma[i].item())

    return denoiser


def image(seeds: Tensor = SEEDS) -> Tensor:
    return image_streams(seeds).uniform("image", SHAPE) * 2 - 1


def sampled(sampler: SamplerConfig, process: Process, source: FromImages, seeds: Tensor = SEEDS) -> Tensor:
    grid, streams = sampler.grid(process), image_streams(seeds)
    return source.sample(sampler, toy(grid), grid, initial_noise(streams, SHAPE), streams)


@pytest.mark.parametrize("resamplings", [1, 3])
@every
def test_known_pixels_are_exact_and_determine_the_rest(
    sampler: SamplerConfig, process: Process, resamplings: int
) -> None:
    made, other = (
        sampled(sampler, process, FromImages(known=known, mask=MASK, resamplings=resamplings))
        for known in (image(), image().flip(0))
    )
    mask = MASK.expand_as(made)
    assert torch.equal(made[mask], image()[mask])
    assert made.isfinite().all() and not torch.equal(made[~mask], other[~mask])
    assert not torch.equal(made[~mask], sampled(sampler, process, FromImages())[~mask])


def test_known_pixels_have_the_noise_of_every_level() -> None:
    """Mean and variance of 2^15 values are those of q(x_s | x0) at each level."""
    x0, count = 0.6, 2**15
    for sampler, process in (CASES[0], *CASES[3:7]):
        grid, streams = sampler.grid(process), image_streams(torch.arange(8))
        known = torch.full((8, 1, 64, count // 512), x0)
        mask = torch.ones_like(known, dtype=torch.bool)
        noise = initial_noise(streams, tuple(known.shape[1:]))
        steps = FromImages(known=known, mask=mask).trajectory(sampler, toy(grid), grid, noise, streams)
        for step, alpha, sigma in zip(steps, grid.alpha[1:].tolist(), grid.sigma[1:].tolist(), strict=True):
            error = 5 * sigma / math.sqrt(known.numel())
            assert step.x.mean().item() == pytest.approx(alpha * x0, abs=error + 1e-5)
            assert step.x.std().item() == pytest.approx(sigma, abs=error + 1e-5)


def test_learned_mean_and_variance_are_posterior_for_known_pixels() -> None:
    grid = Discrete().build().grid(6)
    x, known = torch.randn(2, *SHAPE), torch.zeros(2, *SHAPE)

    def denoiser(x: Tensor, i: int) -> Denoised:
        return Denoised(x, x, log_variance=x, mean=x)

    mask = RIGHT.expand(2, 1, 4, 4)
    denoised, step = with_known(denoiser, grid, known, mask)(x, 2), grid.steps.at(2, x)
    assert denoised.log_variance is not None and denoised.mean is not None
    assert torch.equal(denoised.mean[..., 2:], step.posterior_mean(known, x)[..., 2:])
    assert (denoised.log_variance[..., 2:] == step.log_variance).all()
    assert torch.equal(denoised.mean[..., :2], x[..., :2]) and torch.equal(denoised.log_variance[..., :2], x[..., :2])


@every
def test_strength_0_is_the_image_and_strength_1_is_sampling_from_noise(
    sampler: SamplerConfig, process: Process
) -> None:
    assert torch.equal(sampled(sampler, process, FromImages(start=image(), strength=0.0)), image())
    grid, streams = sampler.grid(process), image_streams(SEEDS)
    plain = sampler(toy(grid), grid, initial_noise(streams, SHAPE), streams)
    for source in (FromImages(), FromImages(start=image(), strength=1.0)):
        assert torch.equal(sampled(sampler, process, source), plain)
    half = sampled(sampler, process, FromImages(start=image(), strength=0.5))
    assert not torch.equal(half, plain) and not torch.equal(half, image())


@every
def test_sample_from_images_depends_only_on_its_seed(sampler: SamplerConfig, process: Process) -> None:
    def made(rows: slice) -> Tensor:
        x0 = image(SEEDS[rows])
        source = FromImages(x0.flip(3), 0.7, x0, MASK[rows], resamplings=2)
        return sampled(sampler, process, source, SEEDS[rows])

    # Rounding: another batch may sum the mean over an image in another order.
    torch.testing.assert_close(made(slice(1, 2)), made(slice(0, 3))[1:2], rtol=0, atol=1e-5)


def test_each_resampling_adds_new_noise() -> None:
    sampler = Ddim(num_steps=2)
    three, two = (
        sampled(sampler, Discrete(), FromImages(known=image(), mask=MASK, resamplings=repeats)) for repeats in (3, 2)
    )
    assert not torch.equal(three, two)


def test_single_tile_equals_the_denoiser() -> None:
    grid = Discrete().build().grid(4)
    only = toy(grid)
    assert Tiles(overlap=0.0).joined([only], (4, 4)) is only and Tiles().shape((4, 4)) == (4, 4)


@pytest.mark.parametrize(("overlap", "width"), [(0.0, 16), (0.5, 12), (0.75, 10)])
def test_overlapping_tiles_blend_without_a_seam(overlap: float, width: int) -> None:
    tiles = Tiles(rows=1, columns=2, overlap=overlap)
    assert tiles.shape((8, 8)) == (8, width)

    def constant(value: float) -> Denoiser:
        def denoiser(x: Tensor, i: int) -> Denoised:
            assert x.shape == (1, 3, 8, 8)
            return Denoised(torch.full_like(x, value), torch.full_like(x, 1 - value))

        return denoiser

    joined = tiles.joined([constant(0.0), constant(1.0)], (8, 8))(torch.zeros(1, 3, 8, width), 0)
    steps = joined.x0.diff(dim=3)
    largest = 1.0 if not overlap else 0.25
    assert (steps >= 0).all() and steps.max().item() <= largest
    assert (joined.x0[..., 0] == 0).all() and (joined.x0[..., -1] == 1).all()
    torch.testing.assert_close(joined.x0 + joined.eps, torch.ones(1, 3, 8, width))


def test_tiles_of_a_pointwise_denoiser_equal_the_whole_image() -> None:
    grid = Discrete().build().grid(4)

    def pointwise(x: Tensor, i: int) -> Denoised:
        return Denoised(x.tanh(), (x - grid.alpha[i].item() * x.tanh()) / grid.sigma[i].item(), mean=x, log_variance=-x)

    tiles = Tiles(rows=2, columns=3, overlap=0.5)
    x = torch.randn(2, 3, *tiles.shape((4, 6)))
    whole, joined = pointwise(x, 1), tiles.joined([pointwise] * 6, (4, 6))(x, 1)
    for name in ("x0", "eps", "mean", "log_variance"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
