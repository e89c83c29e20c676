"""Import of U-Net weights: settings inferred from shapes and file names, and errors for unsuitable files."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import parse
from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.diffusion import PUBLISHED
from image_diffusion.networks.unet import UNet, UNetConfig
from image_diffusion.networks.weights.unet import is_unet, unet_of_shapes
from image_diffusion.stages.export import read_foreign
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.training.load_model import load_codec, load_model

SMALL = {"channels": 32, "num_res_blocks": 1}
SPEC = DataSpec(channels=3, resolution=32)
CIFAR = "cifar10_uncond_50M_500K.pt"


def random_unet(spec: DataSpec = SPEC, **changes) -> UNet:
    """Build a U-Net with all weights non-zero."""
    torch.manual_seed(0)
    network = UNetConfig(**{**SMALL, **changes}).build(spec, learned_variance=True).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05)
    return network


def read(tensors: dict[str, Tensor], path: Path, experiment: Path | None = None) -> Path:
    """Write tensors to a file, import that file, and return the weights folder."""
    save = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
    save(tensors, path)
    read_foreign(path, "none", experiment, path.parent / "train")
    return path.parent / "train"


def describe(folder: Path, **network) -> Path:
    """Write an experiment file for images of 8 pixels."""
    path = folder / "mine.yaml"
    sections = {
        "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 8},
        "system": {
            "type": "iddpm",
            "network": {**SMALL, "multipliers": [1, 1], "attention_resolutions": [4], **network},
        },
        "train": {"steps": 1},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.mark.parametrize(
    ("resolution", "changes", "told"),
    [
        (32, {"num_heads": 2}, {"num_heads": 2}),
        (64, {"num_res_blocks": 3, "dropout": 0.3}, {"dropout": 0.3}),
        (64, {"scale_shift_norm": False, "attention_resolutions": [16], "num_heads": 1}, {"num_heads": 1}),
        (128, {"residual_resampling": True, "attention_resolutions": [32, 16, 8]}, {}),
        (256, {"num_res_blocks": 2}, {}),
        (512, {"channels": 64, "residual_resampling": True, "head_channels": 32}, {"head_channels": 32}),
        (512, {"channels": 64, "residual_resampling": True, "stem": "iddpm"}, {}),
    ],
)
@pytest.mark.parametrize("num_classes", [0, 7])
def test_network_is_inferred_from_tensor_shapes(resolution, changes, told, num_classes):
    config = UNetConfig(**{**SMALL, **changes})
    conditions = {"image": (3, 64, 64)} if resolution == 256 else {}  # an upsampler
    spec = DataSpec(channels=3, resolution=resolution, num_classes=num_classes, conditions=conditions)
    with torch.device("meta"):
        tensors = config.build(spec, learned_variance=True).state_dict()
    assert is_unet(tensors)
    assert unet_of_shapes(tensors, told, Path("x.pt")) == (config, spec)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_published_file_becomes_a_model_with_the_same_outputs(tmp_path, suffix):
    """A small network under a published name: the file holds the parameters, its name implies the training settings."""
    network = random_unet(dropout=0.3)
    model = load_model(read(network.state_dict(), (tmp_path / CIFAR).with_suffix(suffix)))
    assert model.system.network == network.config
    assert (model.system.process.num_timesteps, model.system.process.schedule.type) == (4000, "cosine")
    assert model.spec == SPEC and model.classes == []
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([10.0, 900.0])
    with torch.no_grad():
        assert torch.equal(model.network(x, t), network(x, t))


def test_imported_weights_generate_images(tmp_path):
    spec = DataSpec(channels=3, resolution=64, num_classes=5)
    network = random_unet(spec, channels=32, num_heads=4)
    model = load_model(read(network.half().state_dict(), tmp_path / "imagenet64_cond_270M_250K.pt"))
    assert model.classes == ["0", "1", "2", "3", "4"]
    assert next(model.network.parameters()).dtype == torch.float32
    codec = load_codec(model, None, torch.device("cpu"))
    assert isinstance(codec, Rgb)
    settings = parse(SampleConfig, {"sampler": {"type": "ddim", "num_steps": 2, "clip_denoised": True}}, "sample")
    images = Generator(model.network, model.system.reading, model.spec, codec, settings)(
        torch.arange(2), torch.tensor([0, 4])
    )
    assert images.shape == (2, 3, 64, 64) and images.dtype == torch.uint8


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_experiment_describes_a_network_without_published_name(tmp_path, drop):
    spec = DataSpec(channels=3, resolution=8, num_classes=4)
    config = UNetConfig(**SMALL, multipliers=(1, 1), attention_resolutions=(4,), num_heads=2)
    network = config.build(spec, learned_variance=True, null_label=drop > 0)
    experiment = describe(tmp_path, num_heads=2)
    sections = yaml.safe_load(experiment.read_text())
    sections["system"]["objective"] = {
        "type": "denoising", "variance": "learned_range", "loss": "hybrid", "label_drop_probability": drop,
    }  # fmt: skip
    experiment.write_text(yaml.safe_dump(sections))
    model = load_model(read(network.state_dict(), tmp_path / "mine.pt", experiment))
    assert model.system.network == config and model.spec == spec


def test_published_recipes_are_valid():
    assert len(PUBLISHED) == 19
    assert PUBLISHED["lsun_uncond_100M_1200K_bs128"].network == {"num_heads": 1}
    for recipe in PUBLISHED.values():
        UNetConfig(**recipe.network)
        assert recipe.objective.variance == "learned_range"


def test_file_without_published_name_needs_an_experiment(tmp_path):
    with pytest.raises(
        ValueError, match=r"mine\.pt is a U-Net without a published name.*Give an experiment .*--experiment"
    ):
        read(random_unet().state_dict(), tmp_path / "mine.pt")


def test_missing_tensors_are_reported(tmp_path):
    tensors = random_unet().state_dict()
    del tensors["middle_block.1.qkv.bias"]
    with pytest.raises(ValueError, match=r"does not fit.* missing: middle_block\.1\.qkv\.bias\. Use weights"):
        read(tensors, tmp_path / CIFAR)
    with pytest.raises(ValueError, match=r"not a complete U-Net: time_embed\.0\.weight, out\.2\.weight missing"):
        read({n: t for n, t in tensors.items() if not n.startswith(("time", "out."))}, tmp_path / CIFAR)


def test_unexpected_tensors_are_reported(tmp_path):
    tensors = random_unet().state_dict() | {"stem.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected: stem\.weight"):
        read(tensors, tmp_path / CIFAR)


def test_tensors_of_another_shape_are_reported(tmp_path):
    tensors = random_unet().state_dict() | {"out.0.bias": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"of another shape: out\.0\.bias \[3\] instead of \[32\]"):
        read(tensors, tmp_path / CIFAR)


def test_unpublished_channel_levels_are_rejected(tmp_path):
    tensors = random_unet(multipliers=(1, 1, 2), attention_resolutions=(16,)).state_dict()
    with pytest.raises(ValueError, match=r"32, 32, 64 channels from level to level, as no published network"):
        read(tensors, tmp_path / CIFAR)


def test_networks_of_non_rgb_images_are_rejected(tmp_path):
    tensors = random_unet(DataSpec(channels=1, resolution=32)).state_dict()
    with pytest.raises(ValueError, match="reads 1 channels and returns 2; a U-Net of RGB images"):
        read(tensors, tmp_path / CIFAR)


def test_experiments_of_another_system_are_rejected(tmp_path):
    experiment = describe(tmp_path)
    sections = yaml.safe_load(experiment.read_text())
    sections["system"] = {"type": "dit", "network": {"size": "DiT-S/8"}}
    experiment.write_text(yaml.safe_dump(sections))
    with pytest.raises(ValueError, match=r"system of type iddpm, but .*mine\.yaml has system\.type dit\. Use iddpm\."):
        read(random_unet().state_dict(), tmp_path / "mine.pt", experiment)
