"""U-Nets as UNet2DModel and DDPMPipeline of diffusers: the same function and images, or a clear error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, merged, read_yaml, to_yaml
from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import image_streams, initial_noise, step_noise
from image_diffusion.core.types import NUMBERS, DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.networks.weights.unet import to_diffusers_unet
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Cosine, Discrete, Linear
from image_diffusion.stages.export import write_model
from image_diffusion.systems.base import Model
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.systems.diffusion.iddpm import IddpmSystem

ROOT = Path(__file__).parents[2]
SPEC = DataSpec(channels=3, resolution=16)
SMALL: dict[str, Any] = {
    "channels": 32, "multipliers": (1, 2), "num_res_blocks": 2, "attention_resolutions": (8,), "num_heads": 2,
}  # fmt: skip
EVERY = torch.arange(1000).float()


def randomised(network: nn.Module) -> nn.Module:
    """Add noise to all parameters, since some start at zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return network.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({}, EVERY),
        ({"scale_shift_norm": False, "num_res_blocks": 1}, EVERY),
        ({"attention_order": "new"}, EVERY),
        ({"multipliers": (1, 2, 3), "head_channels": 32, "attention_resolutions": (16, 4)}, EVERY),
        ({"stem": "iddpm", "attention_resolutions": ()}, EVERY / 4),
    ],
    ids=["default", "no-scale-shift", "new-order", "levels", "rescaled-times"],
)
def test_converted_network_is_the_same_function(changes: dict[str, Any], times: Tensor) -> None:
    torch.manual_seed(0)
    network = randomised(UNetConfig(**SMALL | changes).build(SPEC, learned_variance=True))
    unet = to_diffusers_unet(network, times)  # type: ignore[arg-type]
    x, t = torch.randn(3, 3, 16, 16), torch.tensor([0, 17, 999])
    torch.testing.assert_close(unet(x, t).sample, network(x, times[t]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variance", ["learned_range", "fixed_small", "fixed_large"])
def test_pipeline_makes_the_same_images_from_the_same_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variance: Any
) -> None:
    """With the paper's 4,000 cosine timesteps rescaled to 0 to 1000, and with 1,000 linear ones."""
    from diffusers import DDPMPipeline

    learned = variance == "learned_range"
    process = (
        Discrete(schedule=Cosine(), num_timesteps=4000, rescale_timesteps=True)
        if learned
        else Discrete(schedule=Linear())
    )
    objective = Denoising(
        variance=variance, loss="rescaled_hybrid" if learned else "simple", label_drop_probability=0.0
    )
    system = IddpmSystem(network=UNetConfig(**SMALL), process=process, objective=objective)
    torch.manual_seed(0)
    network = randomised(system.build_network(SPEC))
    codec = {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None}
    model = Model(network, SPEC, codec, [], 1, 1, "0" * 64, num_steps=1, fingerprint="", system=system)
    use = write_model(model, "diffusers", None, tmp_path / "out")
    assert use.pipeline == "DDPMPipeline"
    seeds = torch.tensor([3, 11])
    settings = SampleConfig(sampler={"type": "ddpm", "num_steps": 20}, precision="float32")  # type: ignore[arg-type]
    rgb = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    ours = Generator(network, system.reading, SPEC, rgb, settings)(seeds, None)

    def noise() -> Iterator[Tensor]:
        streams = image_streams(seeds, settings.seed)
        yield (x := initial_noise(streams, (3, 16, 16)))
        for i in range(20):
            yield step_noise(streams, i, x)

    numbers = noise()
    for module in ("pipelines.ddpm.pipeline_ddpm", "schedulers.scheduling_ddpm"):
        monkeypatch.setattr(
            f"diffusers.{module}.randn_tensor",
            lambda shape, **_: next(numbers).expand(shape) if shape[1] == 3 else 1 / 0,
        )
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "out")
    made = pipeline(batch_size=2, num_inference_steps=20, output_type="np").images
    theirs = np.round(made * 255).transpose(0, 3, 1, 2)
    assert np.abs(theirs - ours.numpy().astype(np.float64)).max() <= 1
    assert ours.float().std() > 20


@pytest.mark.parametrize(
    ("changes", "classes", "told"),
    [
        ({}, 3, "no classes"),
        ({"residual_resampling": True}, 0, "no network.residual_resampling"),
        ({"attention_resolutions": (16, 8)}, 0, r"no attention heads of several widths \(16, 32\)"),
        ({"multipliers": (2, 2)}, 0, "no other width than network.channels at the first level"),
    ],
)
def test_networks_unsupported_by_diffusers_are_rejected(changes: dict[str, Any], classes: int, told: str) -> None:
    spec = DataSpec(channels=3, resolution=16, num_classes=classes)
    with pytest.raises(ValueError, match=f"{told}.* Set export.format to pipeline"):
        to_diffusers_unet(UNetConfig(**SMALL | changes).build(spec), EVERY)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"conditions": {NUMBERS: (2, 2)}}, "no conditions on numbers"),
        ({"levels": Levels(dtype="uint8", channels=("a", "b", "c"), low=(0,) * 3, high=(255,) * 3)}, "no arrays"),
        ({"channels": 2}, "no images of 2 channels"),
    ],
)
def test_data_unsupported_by_diffusers_are_rejected(changes: dict[str, Any], told: str) -> None:
    spec = SPEC.model_copy(update=changes)
    with pytest.raises(ValueError, match=f"{told}. Set export.format to pipeline"):
        to_diffusers_unet(UNetConfig(**SMALL).build(spec), EVERY)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"system": {"process": {"respacing": 50}}}, "DDPMPipeline has no scheduler for this process"),
        (
            {"system": {"objective": {"prediction": "previous_x", "variance": "fixed_small", "loss": "simple"}}},
            "predicts previous_x, which diffusers' DDPM does not support",
        ),
        (
            {
                "data": {"source": {"type": "folder", "path": "images", "classes": "none"}},
                "system": {"condition": {"type": "numbers"}},
                "pairs": {"type": "numbers", "columns": ["age"], "table": "ages.csv"},
            },
            "DDPMPipeline has no conditions on numbers",
        ),
        (
            {
                "data": {"source": {"type": "folder", "path": "images", "classes": "none"}},
                "system": {"condition": {"type": "image", "from": "pairs"}},
                "pairs": {"type": "images", "path": "masks"},
            },
            "DDPMPipeline has no conditions on images",
        ),
        ({"data": {"dtype": "uint16", "channels": 5}}, "has no classes and no arrays and no images of 5 channels"),
    ],
)
def test_unsupported_exports_are_rejected_before_any_work(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    raw = read_yaml(ROOT / "config/experiments/iddpm_demo.yaml")
    path = tmp_path / "x.yaml"
    same = {"export": {"format": "diffusers"}, "evaluate": {"likelihood": None}}
    path.write_text(to_yaml(merged(merged(raw, same), changes)))
    with pytest.raises(ValueError, match=re.escape(told)):
        load_all([path])
