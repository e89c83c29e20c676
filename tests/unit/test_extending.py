"""The examples of docs/extending.md run: each part once; the diffusion system is trained and sampled."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.augment import Augment
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems.base import check_augment
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
NAMES = [
    "samplers.midpoint",
    "objectives.absolute",
    "codecs.grey",
    "metrics.thumbnails",
    "networks.mixer",
    "systems.mixer",
]
SPEC = DataSpec(channels=3, resolution=8, num_classes=2)
STREAMS = Streams(0, torch.zeros(4, dtype=torch.int64), torch.arange(4))


@pytest.fixture(scope="module")
def parts() -> Any:
    """The modules of the page, by the last part of their names; they are removed afterwards."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == len(NAMES)
    found = {}
    for name, block in zip(NAMES, blocks, strict=True):
        module = types.ModuleType(f"image_diffusion.{name}")
        sys.modules[module.__name__] = module
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
        found[name] = module
    yield found
    for name in NAMES:
        del sys.modules[f"image_diffusion.{name}"]


def test_example_system_trains_and_samples(parts: Any) -> None:
    torch.manual_seed(0)
    system = parts["systems.mixer"].MixerSystem()
    config = parts["objectives.absolute"].Absolute()
    assert not config.learns_intervals
    described = system.model_copy(update={"objective": config})
    assert not described.reading.drops_alone and not described.has_null_label
    objective = config.build(Discrete().build(), SPEC)
    network = system.build_network(SPEC)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    batch = Batch(torch.zeros(4, 3, 8, 8), {"label": torch.arange(4) % 2}, STREAMS)
    losses = []
    for _ in range(30):
        loss = objective(network, batch).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    sampler = parts["samplers.midpoint"].Midpoint(num_steps=5)
    settings = SampleConfig().model_copy(update={"sampler": sampler})
    images = Generator(network.eval(), system.reading, SPEC, Rgb(), settings)(
        torch.arange(3), torch.tensor([0, 1, 0]), None
    )
    assert images.shape == (3, 3, 8, 8) and images.dtype == torch.uint8


def test_example_sampler_is_exact_for_exact_predictions(parts: Any) -> None:
    from image_diffusion.process.base import Denoised

    grid = Discrete().build().grid(8)
    x0 = torch.randn(2, 3, 4, 4)

    def denoiser(x: torch.Tensor, i: int) -> Denoised:
        return Denoised(x0=x0, eps=(x - grid.alpha[i] * x0) / grid.sigma[i])

    noise = torch.randn(2, 3, 4, 4)
    found = parts["samplers.midpoint"].Midpoint(num_steps=8)(denoiser, grid, noise.double(), STREAMS)
    torch.testing.assert_close(found, x0.double(), rtol=0, atol=1e-5)


def test_example_codec_preserves_grey_images(parts: Any) -> None:
    codec = parts["codecs.grey"].Grey().build(None, None, torch.device("cpu"), torch.float32)
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8).expand(-1, 3, -1, -1)
    assert torch.equal(codec.decode(codec.draw(codec.encode(images), STREAMS)), images)


def test_example_detector_separates_dark_and_light_images(parts: Any) -> None:
    detector = parts["metrics.thumbnails"].Thumbnails(side=1).build()
    dark, light = (torch.randint(low, low + 100, (300, 3, 8, 8), dtype=torch.uint8) for low in (0, 150))
    far = frechet_between(detector(dark).features, detector(light).features).value
    assert far > 10 * frechet_between(detector(dark[:150]).features, detector(dark[150:]).features).value
    assert detector.metric_name("fd") == "fd_thumbnails"
    assert detector.doubt is None and detector.identity["sha256"] is None


def test_example_network_rejects_augmentation(parts: Any) -> None:
    train = types.SimpleNamespace(augment=Augment())
    experiment: Any = types.SimpleNamespace(system=parts["systems.mixer"].MixerSystem(), train=train)
    with pytest.raises(ValueError, match="network of a system of type mixer does not take it as a condition"):
        check_augment(experiment)
