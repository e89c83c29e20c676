"""A codebook of moving averages: the published update, and the restart of dead codes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.networks.quantizers import VectorQuantiser, VectorQuantiserConfig


def quantiser(**settings: float) -> VectorQuantiser:
    torch.manual_seed(0)
    return VectorQuantiser(5, 3, VectorQuantiserConfig(**settings)).double()


def encodings(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearest(z: Tensor, codes: Tensor) -> Tensor:
    return torch.tensor([min(range(len(codes)), key=lambda i: (row - codes[i]).square().sum().item()) for row in z])


def test_codes_are_the_moving_averages_of_the_paper() -> None:
    """N <- gamma N + (1 - gamma) n, m <- gamma m + (1 - gamma) sum z, e = m / N, in float64."""
    codebook, gamma = quantiser(decay=0.9, dead_below=0), 0.9
    codebook.counts.copy_(torch.rand(5, dtype=torch.float64) + 0.5)
    big_n, m = codebook.counts.clone(), codebook.counts[:, None] * codebook.weight
    for step in range(30):
        z = encodings(7, step)
        _, tokens = codebook.quantize(z.T.reshape(1, 3, 7, 1))
        tokens = tokens.flatten()
        e = m / big_n[:, None]
        assert torch.equal(tokens, nearest(z, e))
        for i in range(5):
            chosen = z[tokens == i]
            big_n[i] = gamma * big_n[i] + (1 - gamma) * len(chosen)
            m[i] = gamma * m[i] + (1 - gamma) * chosen.sum(0)
        codebook.update_from(tokens, z, torch.rand(7))
        torch.testing.assert_close(codebook.counts, big_n)
        torch.testing.assert_close(codebook.weight, m / big_n[:, None])


def test_first_encodings_replace_a_code_and_unused_codes_stay() -> None:
    codebook = quantiser(dead_below=0)
    before, z = codebook.weight.clone(), encodings(4, 0)
    codebook.update_from(torch.tensor([2, 2, 0, 2]), z, torch.rand(4))
    torch.testing.assert_close(codebook.weight[2], z[[0, 1, 3]].mean(0))
    torch.testing.assert_close(codebook.weight[0], z[2])
    assert torch.equal(codebook.weight[[1, 3, 4]], before[[1, 3, 4]])
    for _ in range(100_000 // 1000):
        codebook.counts.mul_(1e-5)  # as after many thousands of steps without use
    codebook.update_from(torch.tensor([1]), z[:1], torch.rand(1))
    assert codebook.weight.isfinite().all()


def test_dead_codes_restart_at_encodings_in_order_of_the_draws() -> None:
    codebook = quantiser(decay=0.5, dead_below=0.2)
    codebook.counts.copy_(torch.tensor([4.0, 0.1, 4.0, 0.2, 4.0]))
    codebook.weight.copy_(encodings(5, 9))
    z = encodings(3, 1)
    tokens, draws = torch.tensor([0, 2, 4]), torch.tensor([0.7, 0.1, 0.4])
    live = codebook.weight.clone()
    codebook.update_from(tokens, z, draws)
    assert torch.equal(codebook.weight[[1, 3]], z[[1, 2]])
    assert not torch.equal(codebook.weight[[0, 2, 4]], live[[0, 2, 4]])
    assert codebook.counts[1] == codebook.counts[3] and codebook.counts[1] > 0.2 * codebook.counts.mean()
    order = torch.tensor([2, 0, 1])
    other = quantiser(decay=0.5, dead_below=0.2)
    other.counts.copy_(torch.tensor([4.0, 0.1, 4.0, 0.2, 4.0]))
    other.weight.copy_(live)
    other.update_from(tokens[order], z[order], draws[order])
    torch.testing.assert_close(other.weight, codebook.weight)


def test_dead_codes_beyond_the_number_of_encodings_wait() -> None:
    codebook = quantiser(dead_below=0.5)
    before = codebook.weight.clone()
    codebook.update_from(torch.tensor([0, 0]), encodings(2, 0), torch.tensor([0.9, 0.1]))
    assert torch.equal(codebook.weight[[1, 2]], encodings(2, 0)[[1, 0]])
    assert torch.equal(codebook.weight[3:], before[3:])


def test_gradient_passes_straight_through_to_the_encoding() -> None:
    codebook = quantiser()
    z = encodings(4, 2).T.reshape(1, 3, 2, 2).requires_grad_()
    codes, tokens = codebook.quantize(z)
    torch.testing.assert_close(codes.movedim(1, -1), codebook(tokens))
    factor = torch.randn_like(codes)
    (codes * factor).sum().backward()
    assert torch.equal(cast(Tensor, z.grad), factor)
    assert not list(codebook.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": (4, 3)}, "levels and vector_quantiser are both set. Leave one"),
        ({"estimator": "reinmax"}, "estimator is reinmax, but vector_quantiser has no estimator"),
    ],
)
def test_vector_quantiser_excludes_other_quantisation_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DVAEConfig(vector_quantiser=VectorQuantiserConfig(), **settings)
