"""The IDDPM system: its defaults, losses and images."""

from __future__ import annotations

import pytest
import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems import AnySystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.systems.diffusion.iddpm import IddpmSystem

SPEC = DataSpec(channels=3, resolution=8, num_classes=3)
NETWORK = {"channels": 32, "multipliers": [1, 1], "num_res_blocks": 1, "attention_resolutions": [4], "dropout": 0.1}


def system(**changes) -> IddpmSystem:
    """Return a small system, parsed from plain data as in an experiment file."""
    data = {"type": "iddpm", "network": NETWORK, "process": {"type": "discrete", "num_timesteps": 20}, **changes}
    built = parse(AnySystem, data, "system")
    assert isinstance(built, IddpmSystem)
    return built


def batch(size: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 3, 8, 8, generator=generator) * 2 - 1
    streams = Streams(seed=0, epoch=torch.zeros(size, dtype=torch.int64), sample=torch.arange(size))
    return Batch(x, {"label": torch.arange(size) % 3}, streams)


def test_defaults_are_those_of_the_paper():
    default = parse(AnySystem, {"type": "iddpm"}, "system")
    assert isinstance(default.process, Discrete) and isinstance(default.objective, Denoising)
    assert (default.process.schedule.type, default.process.num_timesteps) == ("cosine", 4000)
    assert default.process.rescale_timesteps
    objective = default.objective
    assert (objective.prediction, objective.variance, objective.loss) == ("eps", "learned_range", "rescaled_hybrid")
    assert parse(AnySystem, dump(default), "system") == default


@pytest.mark.parametrize(("probability", "rows"), [(0.0, 3), (0.1, 4)])
def test_label_dropout_adds_a_null_label(probability, rows):
    objective = {"type": "denoising", "label_drop_probability": probability}
    assert system(objective=objective).build_network(SPEC).label_emb.weight.shape[0] == rows


@pytest.mark.parametrize(
    "objective",
    [
        {"type": "denoising"},
        {"type": "denoising", "prediction": "x0", "variance": "fixed_small", "loss": "simple"},
        {"type": "denoising", "variance": "learned_range", "loss": "rescaled_hybrid"},
        {"type": "denoising", "variance": "learned_range", "loss": "rescaled_kl"},
        {"type": "denoising", "variance": "learned_range", "loss": "hybrid", "label_drop_probability": 0.5},
    ],
    ids=["simple", "x0", "hybrid", "kl", "dropped"],
)
def test_every_objective_decreases_on_one_batch(objective):
    torch.manual_seed(0)
    small = system(objective=objective)
    network, loss_of = small.build_network(SPEC), small.build_objective(SPEC)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss = loss_of(network, batch()).loss.mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_images_do_not_depend_on_their_batch(sampler):
    torch.manual_seed(0)
    small = system(objective={"type": "denoising", "variance": "learned_range", "loss": "rescaled_hybrid"})
    network = small.build_network(SPEC).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    settings = parse(SampleConfig, {"sampler": {"type": sampler, "num_steps": 4, "clip_denoised": True}}, "sample")
    generator = Generator(network, small.reading, SPEC, Rgb(), settings)
    seeds, labels = torch.arange(4), torch.tensor([0, 1, 2, 0])
    images = generator(seeds, labels)
    assert images.shape == (4, 3, 8, 8) and images.dtype == torch.uint8
    alone = generator(seeds[2:3], labels[2:3])
    assert (images[2:3].int() - alone.int()).abs().max() <= 1
    assert not torch.equal(images[0], images[3])
