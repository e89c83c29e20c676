"""The discrete VAE against the original: names, logits, tokens, decoding, the three estimators, the loss.

Three differences are wanted, each with a test of its own here: the divergence is a mean and not a sum over batch and
positions, decoding returns pixels and not the normalised range, and the temperature does not compound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.objectives.autoencoding import DiscreteAutoencoding, DiscreteAutoencodingConfig

CASES = ["a", "noresnet_rgba", "smoothl1"]
ESTIMATORS = {"soft": "gumbel_softmax", "st": "straight_through", "st_reinmax": "reinmax"}
CLOSE = {"rtol": 1e-3, "atol": 5e-5}


@dataclass(frozen=True)
class GivenNoise:
    """Streams that return the noise of a golden case."""

    noise: Tensor

    def gumbel(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        assert purpose == "gumbel" and shape == tuple(self.noise.shape[1:])
        return self.noise


def config_of(params: dict[str, Any], estimator: str = "gumbel_softmax") -> DVAEConfig:
    names = ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
    return DVAEConfig(**{name: params[name] for name in names}, estimator=estimator)


def network_of(file: Any, case: str, estimator: str = "gumbel_softmax") -> DVAE:
    params = file.params(case)
    spec = DataSpec(channels=params.get("channels", 3), resolution=params["image_size"])
    network = config_of(params, estimator).build(spec)
    network.load_state_dict(file.tensors(f"{case}/sd"))
    return network


def objective_of(file: Any, case: str, temperature: float, **settings: Any) -> DiscreteAutoencoding:
    params = file.params(case)
    config = DiscreteAutoencodingConfig(
        reconstruction="smooth_l1" if params.get("smooth_l1_loss") else "mse",
        temperature={"start": temperature, "final": temperature},
        **settings,
    )
    return config.build(tuple(file[f"{case}/logits"].shape[1:]))


def batch_of(file: Any, case: str) -> Batch:
    return Batch(2 * file[f"{case}/img"] - 1, {}, GivenNoise(file[f"{case}/gumbel"]))


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_decoded_pixels_of_original(golden, case):
    file = golden("m04_dvae.npz")
    network, x = network_of(file, case), batch_of(file, case).x
    with torch.no_grad():
        close(network.normalise(x), file[f"{case}/norm_img"])
        close(network.logits(x), file[f"{case}/logits"])
        assert torch.equal(network.indices(x).flatten(1), file[f"{case}/indices"])
        grid = file[f"{case}/logits"].shape[2:]
        given = network.hard_latent(file[f"{case}/given_indices"].unflatten(1, grid))
        close(network.normalise(network.decode(given)), file[f"{case}/decoded_given"])
        close(network.normalise(network.decode(network.hard_latent(network.indices(x)))), file[f"{case}/hard_recon"])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("case", CASES)
def test_reconstruction_loss_and_gradients_of_the_original(golden, case, kind, temperature):
    file = golden("m04_dvae.npz")
    network, batch = network_of(file, case, ESTIMATORS[kind]), batch_of(file, case)
    key = f"{case}/{kind}_tau{temperature}_kl0.0"
    reconstruction, target, _ = network(batch.x, batch.streams.gumbel("gumbel", file[f"{case}/logits"].shape[1:]),
                                        torch.tensor(temperature))  # fmt: skip
    close(reconstruction, file[f"{key}/recon"])
    close(target, file[f"{case}/norm_img"])
    loss = objective_of(file, case, temperature)(network, batch).loss.mean()
    close(loss, file[f"{key}/loss"])
    loss.backward()
    close(network.codebook.weight.grad.norm(), file[f"{key}/grad_codebook_norm"])
    close(network.encoder[-1].weight.grad.norm(), file[f"{key}/grad_enc_last_norm"])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_difference_divergence_is_a_mean_and_original_sum_is_an_option(golden, case, temperature):
    file = golden("m04_dvae.npz")
    batch, key = batch_of(file, case), f"{case}/soft_tau{temperature}_kl0.01"
    per_position = file[f"{case}/kl_per_position"]
    network = network_of(file, case)
    ours = objective_of(file, case, temperature, kl_weight=0.01)(network, batch)
    close(ours.parts["kl"], per_position.mean(1))
    close(ours.loss.mean(), file[f"{key}/recon_loss"] + 0.01 * per_position.mean())
    theirs = objective_of(file, case, temperature, kl_weight=0.01, kl_summed_over_batch=len(batch.x))(network, batch)
    close(theirs.loss.mean(), file[f"{key}/loss"])
    theirs.loss.mean().backward()
    close(network.codebook.weight.grad.norm(), file[f"{key}/grad_codebook_norm"])
    close(network.encoder[-1].weight.grad.norm(), file[f"{key}/grad_enc_last_norm"])


@pytest.mark.parametrize("case", CASES)
def test_difference_decoded_images_have_range_of_images(golden, case):
    """The original returns the normalised range, in which its own image logs then disagree with their originals."""
    file = golden("m04_dvae.npz")
    network = network_of(file, case)
    mean, std = config_of(file.params(case)).normalisation(network.spec)
    grid = file[f"{case}/logits"].shape[2:]
    with torch.no_grad():
        images = network.decode(network.hard_latent(file[f"{case}/given_indices"].unflatten(1, grid)))
    pixels = file[f"{case}/decoded_given"] * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    close(images, 2 * pixels - 1)


def test_difference_temperature_depends_on_step_and_does_not_compound(golden):
    """The original multiplies the temperature of 100 steps ago with exp(-rate step), and starts anew each epoch."""
    file = golden("m04_dvae.npz")
    params = file.params("schedule_trace")
    steps, theirs = file["schedule_trace/global_step"], file["schedule_trace/temp"]
    schedule = DiscreteAutoencodingConfig(
        temperature={"start": params["starting_temp"], "rate": params["anneal_rate"], "final": params["temp_min"]}
    ).temperature
    ours = [schedule.at(int(step)) for step in steps]
    expected = [max(params["starting_temp"] * math.exp(-params["anneal_rate"] * int(step)), 0.5) for step in steps]
    assert ours == pytest.approx(expected, rel=1e-12)
    assert theirs[-1] < ours[-1] and not torch.allclose(theirs, torch.tensor(ours, dtype=torch.float64), rtol=1e-9)
