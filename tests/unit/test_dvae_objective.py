"""The objective of the discrete VAE: losses per image, and a temperature schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.objectives.autoencoding import DiscreteAutoencodingConfig, token_use
from image_diffusion.systems.codec.dvae import DVAESystem

SYSTEM = DVAESystem.model_validate(
    {
        "network": {"num_tokens": 6, "codebook_dim": 5, "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8},
        "objective": {"kl_weight": 0.1, "temperature": {"start": 1.0, "rate": 0.1, "final": 0.4}},
    }
)
SPEC = DataSpec(channels=3, resolution=16)


def batch_of(samples: list[int], step: int = 0) -> Batch:
    ids = torch.tensor(samples)
    streams = Streams(0, torch.zeros_like(ids), ids)
    return Batch(streams.uniform("images", (3, 16, 16)) * 2 - 1, {}, streams, step)


@pytest.mark.parametrize("reconstruction", ["mse", "smooth_l1"])
@pytest.mark.parametrize("estimator", ["gumbel_softmax", "straight_through", "reinmax"])
def test_loss_of_an_image_does_not_depend_on_its_batch(estimator: str, reconstruction: str) -> None:
    torch.manual_seed(0)
    system = SYSTEM.model_copy(
        update={
            "network": SYSTEM.network.model_copy(update={"estimator": estimator}),
            "objective": SYSTEM.objective.model_copy(update={"reconstruction": reconstruction}),
        }
    )
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    whole = objective(network, batch_of([4, 9, 2, 7], step=3))
    for row, sample in enumerate([4, 9, 2, 7]):
        alone = objective(network, batch_of([sample], step=3))
        torch.testing.assert_close(alone.loss[0], whole.loss[row])
        for name, part in alone.parts.items():
            torch.testing.assert_close(part[0], whole.parts[name][row])
    expected = whole.parts[reconstruction] + 0.1 * whole.parts["kl"]
    torch.testing.assert_close(whole.loss.detach(), expected)


class Constant:
    """A network that predicts one distribution for every position and returns the image unchanged."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits).view(1, -1, 1, 1)

    def __call__(self, x: Tensor, gumbel: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, self.logits.expand_as(gumbel)


@pytest.mark.parametrize("edge", [2, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_kl_does_not_depend_on_image_or_batch_size(edge: int, batch: int) -> None:
    objective = DiscreteAutoencodingConfig(kl_weight=2.0).build((3, edge, edge))
    losses = objective(Constant([1.0, 0.0, -2.0]), batch_of(list(range(batch))))
    q = torch.softmax(torch.tensor([1.0, 0.0, -2.0]), 0)
    kl = (q * (q * 3).log()).sum()
    torch.testing.assert_close(losses.parts["kl"], kl.expand(batch))
    torch.testing.assert_close(losses.loss, 2 * kl.expand(batch))
    for name in ("tokens", "perplexity"):
        torch.testing.assert_close(losses.parts[name], torch.ones(batch))
    uniform = objective(Constant([1.0, 1.0, 1.0]), batch_of([0]))
    assert abs(uniform.loss.item()) < 1e-6


def test_temperature_decreases_with_the_step_to_its_final_value() -> None:
    temperature = SYSTEM.objective.temperature
    assert [temperature.at(step) for step in (0, 1, 5)] == pytest.approx([1.0, math.exp(-0.1), math.exp(-0.5)])
    assert temperature.at(10) == temperature.at(10**9) == 0.4
    network, objective = SYSTEM.build_network(SPEC), SYSTEM.build_objective(SPEC)
    for step in (0, 5, 10):
        parts = objective(network, batch_of([0, 1], step)).parts
        torch.testing.assert_close(parts["temperature"], torch.full((2,), temperature.at(step)))


@pytest.mark.parametrize(
    ("temperature", "message"),
    [
        ({"start": 0.0}, "temperature.start is 0.0: input should be greater than 0"),
        ({"final": -0.5}, "temperature.final is -0.5: input should be greater than 0"),
        ({"start": 0.2, "final": 0.5}, "final is 0.5, above start = 0.2"),
    ],
)
def test_invalid_temperatures_are_rejected(temperature: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(DiscreteAutoencodingConfig, {"temperature": temperature}, "x.yaml")


def test_temperature_may_be_constant() -> None:
    steady = parse(DiscreteAutoencodingConfig, {"temperature": {"start": 0.5, "final": 0.5}}, "x.yaml").temperature
    assert [steady.at(step) for step in (0, 1000)] == [0.5, 0.5]


def test_token_use_counts_tokens_and_perplexity() -> None:
    rows = [[3, 3, 3, 3], [0, 1, 2, 3], [5, 5, 0, 0], [7, 7, 7, 1]]
    num_tokens, perplexity = token_use(torch.tensor(rows))
    for row, number, value in zip(rows, num_tokens, perplexity, strict=True):
        p = np.unique(row, return_counts=True)[1] / len(row)
        assert number.item() == pytest.approx(len(p)) and value.item() == pytest.approx(np.exp(-(p * np.log(p)).sum()))


FINITE = {"type": "dvae", "network": {"levels": [4, 3], "num_layers": 2, "num_resnet_blocks": 0, "hidden_dim": 8}}


@pytest.mark.parametrize("reconstruction", ["mse", "smooth_l1"])
def test_loss_of_finite_scalars_is_the_reconstruction_error_alone(reconstruction: str) -> None:
    torch.manual_seed(0)
    system = DVAESystem.model_validate(FINITE | {"objective": {"reconstruction": reconstruction}})
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    whole = objective(network, batch_of([4, 9, 2], step=3))
    assert set(whole.parts) == {"mse", reconstruction, "tokens", "perplexity"}
    assert torch.equal(whole.loss.detach(), whole.parts[reconstruction])
    for row, sample in enumerate([4, 9, 2]):
        torch.testing.assert_close(objective(network, batch_of([sample])).loss[0], whole.loss[row])
    whole.loss.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in network.parameters())


NEAREST = {
    "type": "dvae",
    "network": {
        "num_tokens": 6, "codebook_dim": 3, "vector_quantiser": {}, "num_layers": 2, "num_resnet_blocks": 0,
        "hidden_dim": 8,
    },
}  # fmt: skip


def test_commitment_loss_and_straight_through_gradient_match_reference() -> None:
    """The reference is the loss and its straight-through gradient in plain PyTorch."""
    torch.manual_seed(0)
    system = DVAESystem.model_validate(NEAREST | {"objective": {"commitment_weight": 0.5}})
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    batch = batch_of([4, 9, 2], step=3)
    losses = objective(network, batch)
    losses.loss.mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    z = network.encoder(network.normalise(batch.x))
    e = network.codebook.weight[torch.cdist(z.flatten(2).mT, network.codebook.weight).argmin(-1)].mT.view_as(z)
    at_code = e.clone().requires_grad_()
    mse = (network.decoder(at_code) - network.normalise(batch.x)).square().mean()
    commitment = (z - e).square().mean()
    torch.testing.assert_close(losses.loss.mean(), mse + 0.5 * commitment)
    mse.backward()
    torch.autograd.backward([z, commitment], [at_code.grad, torch.tensor(0.5)])
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    for row, sample in enumerate([4, 9, 2]):
        alone = objective(network, batch_of([sample]))
        torch.testing.assert_close(alone.loss[0], losses.loss[row])
        assert torch.equal(alone.seen["tokens"][0], losses.seen["tokens"][row])
        assert torch.equal(alone.seen["draws"][0], losses.seen["draws"][row])


def test_commitment_weight_requires_a_vector_quantiser() -> None:
    for system in (FINITE, {"type": "dvae"}):
        with pytest.raises(ValueError, match="commitment_weight is set, but no encoding has a nearest code"):
            DVAESystem.model_validate(system | {"objective": {"commitment_weight": 0.5}})


@pytest.mark.parametrize("setting", [{"kl_weight": 0.1}, {"kl_summed_over_batch": 8}, {"temperature": {"final": 0.1}}])
def test_sampling_settings_are_rejected_if_no_token_is_sampled(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"system.objective.{next(iter(setting))} is set, but system.network.levels"):
        DVAESystem.model_validate(FINITE | {"objective": setting})
    with pytest.raises(ValueError, match=r"is set, but system.network.vector_quantiser draws no token"):
        DVAESystem.model_validate(NEAREST | {"objective": setting})
