"""The discrete VAE: shapes, token sampling, normalisation, and images of other shapes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dvae import DVAE, DVAEConfig, relaxed_one_hot
from image_diffusion.networks.quantizers import FiniteScalars

TINY: dict[str, Any] = {"num_tokens": 6, "codebook_dim": 5, "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8}


def network_of(channels: int = 3, resolution: int = 16, **settings: Any) -> DVAE:
    torch.manual_seed(0)
    return DVAEConfig(**TINY | settings).build(DataSpec(channels=channels, resolution=resolution))


def streams_of(count: int, seed: int = 0) -> Streams:
    ids = torch.arange(count)
    return Streams(seed, torch.zeros_like(ids), ids)


def images_of(count: int, channels: int = 3, resolution: int = 16) -> Tensor:
    return streams_of(count).uniform("images", (channels, resolution, resolution)) * 2 - 1


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("blocks", [0, 2])
def test_shapes(channels: int, layers: int, blocks: int) -> None:
    network = network_of(channels, num_layers=layers, num_resnet_blocks=blocks)
    x, edge = images_of(2, channels), 16 >> layers
    gumbel = streams_of(2).gumbel("gumbel", (6, edge, edge))
    reconstruction, target, logits = network(x, gumbel, torch.tensor(0.7))
    assert reconstruction.shape == target.shape == x.shape and logits.shape == (2, 6, edge, edge)
    assert network.indices(x).shape == (2, edge, edge)
    assert network.soft_latent(x).shape == network.hard_latent(network.indices(x)).shape == (2, 5, edge, edge)
    assert network.decode(network.soft_latent(x)).shape == x.shape


def test_gumbel_noise_draws_tokens_with_their_probabilities() -> None:
    n = 40_000
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5]).view(1, 4, 1).expand(1, 4, n)
    gumbel = streams_of(n).gumbel("gumbel", (4,)).T.unsqueeze(0)
    assert abs(gumbel.mean().item() - 0.57722) < 5 * 1.2825 / (4 * n) ** 0.5
    assert abs(gumbel.var().item() - math.pi**2 / 6) < 0.05
    for estimator in ("straight_through", "reinmax"):
        drawn = relaxed_one_hot(logits, gumbel, torch.tensor(0.3), estimator).mean(dim=(0, 2))
        p = torch.softmax(logits[0, :, 0], 0)
        assert ((drawn - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


def test_soft_samples_approach_one_hot_as_the_temperature_falls() -> None:
    streams = streams_of(50)
    logits, gumbel = streams.normal("logits", (6, 2, 2)), streams.gumbel("gumbel", (6, 2, 2))
    hard = torch.nn.functional.one_hot((logits + gumbel).argmax(1), 6).movedim(-1, 1).float()
    for temperature in (1.0, 0.1):
        for estimator in ("straight_through", "reinmax"):
            given = relaxed_one_hot(logits, gumbel, torch.tensor(temperature), estimator)
            torch.testing.assert_close(given, hard, rtol=0, atol=1e-6)
    distances = [
        (relaxed_one_hot(logits, gumbel, torch.tensor(t), "gumbel_softmax") - hard).abs().mean().item()
        for t in (2.0, 0.5, 0.1, 1e-4)
    ]
    assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-3


def test_reinmax_gradient_is_closer_to_exact_than_straight_through() -> None:
    """The gradient of E[f(token)], f quadratic in the one-hot vector; the exact one sums over all tokens (float64)."""
    n = 20_000
    values = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    at = torch.tensor([0.4, 0.1, -0.6, 0.2], dtype=torch.float64)

    def f(one_hot: Tensor) -> Tensor:
        return (one_hot * values.view(1, 4, 1)).sum(1).sub(0.4).square()

    exact = at.clone().requires_grad_()
    (torch.softmax(exact, 0) * (values - 0.4).square()).sum().backward()
    gumbel = streams_of(n).gumbel("gumbel", (4,)).double().T.unsqueeze(0)
    error = {}
    for estimator in ("straight_through", "reinmax"):
        logits = at.clone().requires_grad_()
        wide = logits.view(1, 4, 1).expand(1, 4, n)
        f(relaxed_one_hot(wide, gumbel, torch.tensor(1.0), estimator)).mean().backward()
        assert logits.grad is not None and exact.grad is not None
        error[estimator] = (logits.grad - exact.grad).norm().item()
    assert error["reinmax"] < 0.5 * error["straight_through"], error


def test_encoder_input_is_normalised_and_decoder_output_is_not() -> None:
    x = images_of(2, 4)
    pixels = (x + 1) / 2
    network = network_of(4, mean=(0.1, 0.2, 0.3, 0.0), std=(0.5, 0.25, 1.0, 2.0))
    mean, std = torch.tensor([0.1, 0.2, 0.3, 0.0]), torch.tensor([0.5, 0.25, 1.0, 2.0])
    torch.testing.assert_close(network.normalise(x), (pixels - mean.view(4, 1, 1)) / std.view(4, 1, 1))
    latent = network.soft_latent(x)
    torch.testing.assert_close(network.normalise(network.decode(latent)), network.decoder(latent))
    assert "scale" not in network.state_dict()


@pytest.mark.parametrize(("channels", "alpha"), [(1, False), (2, True), (3, False), (4, True)])
def test_alpha_stays_between_0_and_1(channels: int, alpha: bool) -> None:
    white = torch.ones(1, channels, 16, 16)
    network = network_of(channels)
    assert torch.equal(network.normalise(white), white)
    black = network.normalise(-white)[0, :, 0, 0].tolist()
    assert black == [-1.0] * (channels - alpha) + [0.0] * alpha


@pytest.mark.parametrize("channels", [2, 4])
def test_arrays_have_no_alpha_channel(channels: int) -> None:
    zeros, ones = (0.0,) * channels, (1.0,) * channels
    levels = Levels(dtype="float32", channels=tuple("abcd"[:channels]), low=zeros, high=ones)
    x, spec = images_of(2, channels), DataSpec(channels=channels, resolution=16, levels=levels)
    assert torch.equal(DVAEConfig(**TINY).build(spec).normalise(x), x)
    chosen = DVAEConfig(**TINY, mean=zeros, std=ones).build(spec).normalise(x)
    assert torch.equal(chosen, (x + 1) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resolution": 48}, r"resolution is 48.*power of two.*32 or 64"),
        ({"resolution": 2}, r"too small for num_layers = 2.*at most 1 layers"),
        ({"mean": (0.5,)}, r"mean has 1 values, but the images have 3 channels"),
        ({"std": (0.5, 0.5, 0.5, 1.0)}, r"std has 4 values, but the images have 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, r"Every std must be above 0"),
    ],
)
def test_invalid_network_sizes_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network_of(**settings)


@pytest.mark.parametrize(("built", "given"), [(4, 3), (3, 4)])
def test_image_channels_must_match_the_network(built: int, given: int) -> None:
    with pytest.raises(
        ValueError, match=rf"shape \[{given}, 16, 16\] but the network was built for \[{built}, 16, 16\]"
    ):
        network_of(built).indices(images_of(1, given))


LEVELS: dict[str, Any] = {"levels": (4, 3, 5), "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8}


def finite(resolution: int = 16, **settings: Any) -> DVAE:
    torch.manual_seed(0)
    return DVAEConfig(**LEVELS | settings).build(DataSpec(channels=3, resolution=resolution))


@pytest.mark.parametrize("levels", [(3,), (4, 3, 5), (8, 6, 5)])
def test_every_combination_of_levels_is_one_token(levels: tuple[int, ...]) -> None:
    grid = FiniteScalars(levels)
    codes = grid(torch.arange(grid.num_embeddings))
    of_each = [[(level - count // 2) / (count // 2) for level in range(count)] for count in levels]
    # The first channel varies fastest.
    expected = [code[::-1] for code in itertools.product(*reversed(of_each))]
    torch.testing.assert_close(codes, torch.tensor(expected))
    far = torch.tensor([-30.0, 0.0, 30.0]).view(3, 1, 1, 1).expand(3, len(levels), 1, 1)
    made, tokens = grid.quantize(far)
    middle = grid.num_embeddings // 2 if all(count % 2 for count in levels) else tokens[1].item()
    assert tokens.flatten().tolist() == [0, middle, grid.num_embeddings - 1]
    assert not made[1].any()


def test_rounding_to_levels_has_a_straight_through_gradient() -> None:
    """For an odd number of levels: round(0.999 (L - 1) / 2 tanh(z))."""
    grid = FiniteScalars((5,))
    values = torch.linspace(-3, 3, 101).view(-1, 1, 1, 1).requires_grad_()
    made, tokens = grid.quantize(values)
    reach = 2 * (1 - 1e-3)
    expected = (reach * values.detach().tanh()).round()
    torch.testing.assert_close(made.detach(), expected / 2)
    assert torch.equal(tokens.flatten(), expected.long().flatten() + 2)
    made.sum().backward()
    torch.testing.assert_close(values.grad, reach / 2 * (1 - values.detach().tanh().square()))


@pytest.mark.parametrize("layout", ["dalle_pytorch", "openai"])
def test_finite_scalar_tokens_decode_to_the_reconstruction(layout: str) -> None:
    network, x = finite(layout=layout), images_of(3)
    reconstruction, target, tokens, _ = network(x)
    assert network.codebook.num_embeddings == 60 and network.config.codebook_dim == 3
    assert torch.equal(tokens, network.indices(x)) and tokens.shape == (3, 4, 4) and len(tokens.unique()) > 1
    assert torch.equal(target, network.normalise(x))
    hard = network.decode(network.hard_latent(tokens))
    torch.testing.assert_close(network.normalise(hard), reconstruction)
    assert torch.equal(network.soft_latent(x), network.hard_latent(tokens))
    reconstructions, of_tokens = network.reconstructions(x)
    assert list(reconstructions) == ["hard"] and torch.equal(reconstructions["hard"], hard)
    assert of_tokens is not None and torch.equal(of_tokens, tokens)
    assert not any(name.startswith("codebook") for name in network.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_are_in_range_in_half_precision(dtype: torch.dtype) -> None:
    for levels in ((3,), (4,), (5,), (8,), (16,)):
        grid = FiniteScalars(levels).to(dtype)
        _, tokens = grid.quantize(torch.linspace(-20, 20, 4001, dtype=dtype).view(-1, 1, 1, 1))
        assert tokens.unique().tolist() == list(range(levels[0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_tokens": 64}, r"num_tokens is 64, but levels is \[4, 3, 5\], from which it follows: 60"),
        ({"codebook_dim": 4}, "codebook_dim is 4, but levels"),
        ({"estimator": "reinmax"}, "estimator is reinmax, but levels"),
        ({"levels": (2, 5)}, "greater than or equal to 3"),
        ({"levels": ()}, "at least 1 item"),
    ],
)
def test_settings_implied_by_levels_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        finite(**settings)
    known = DVAEConfig(**LEVELS)
    assert DVAEConfig.model_validate(known.model_dump()) == known and known.num_tokens == 60
