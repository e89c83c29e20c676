"""Precision and compilation of codecs: each trained codec, and the command `encode`."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.codecs.trained import DVAECodec, Trained
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.stages import encode
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem

CPU = torch.device("cpu")
SPEC = DataSpec(channels=3, resolution=8)
KL = AutoencoderConfig(block_channels=(8, 16), norm_groups=4)
DISCRETE = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=1, num_resnet_blocks=1, hidden_dim=8)
SYSTEMS: dict[str, Config] = {"kl": AutoencoderSystem(network=KL), "dvae": DVAESystem(network=DISCRETE)}


def weights_of(folder: Path, kind: str) -> Path:
    """Untrained weights of a codec, saved like those of a training."""
    torch.manual_seed(0)
    network: nn.Module = (KL if kind == "kl" else DISCRETE).build(SPEC)
    save_weights(folder, network.state_dict(), {"system": dump(SYSTEMS[kind]), "spec": dump(SPEC)})
    return folder


def built(folder: Path, dtype: torch.dtype = torch.float32) -> Codec:
    return Trained(experiment="x").build(folder, None, CPU, dtype)


def images_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", SYSTEMS)
def test_bf16_moments_are_close_to_float32_and_stored_as_float32(tmp_path: Path, kind: str) -> None:
    folder, images = weights_of(tmp_path, kind), images_of(16)
    exact, coarse = (built(folder, dtype).encode(images) for dtype in (torch.float32, torch.bfloat16))
    assert exact.dtype == coarse.dtype == torch.float32
    error = (coarse - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-5 < error < 0.03
    assert built(folder, torch.bfloat16).decode(exact[:, 0]).dtype == torch.uint8


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_compiled_codec_runs_compiled_code(tmp_path: Path, kind: str) -> None:
    torch.compiler.reset()
    codec, images = built(weights_of(tmp_path, kind)), images_of(4)
    expected = codec.encode(images)
    calls = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal calls
        calls += 1
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        original = nn.Module.compile
        patch.setattr(nn.Module, "compile", lambda module: original(module, backend=count))
        codec.compile_encoder()
    assert isinstance(codec, KlCodec | DVAECodec)
    torch.testing.assert_close(codec.encode(images), expected)
    assert calls == 1


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_encode_command_uses_the_configured_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str, dtype: torch.dtype
) -> None:
    (tmp_path / "in").mkdir()
    for number, image in enumerate(images_of(5)):
        pixels = image.permute(1, 2, 0).contiguous().numpy().tobytes()
        (tmp_path / f"in/{number}.ppm").write_bytes(b"P6 8 8 255\n" + pixels)
    data = {"name": "x", "source": {"type": "folder", "path": str(tmp_path / "in")}, "resolution": 8, "num_shards": 1}
    crop_dataset(DataConfig.model_validate(data), tmp_path / "crops")
    weights = weights_of(tmp_path / "weights", kind)
    config = f"codec: {{type: trained, experiment: x}}\nencode: {{precision: {precision}, dtype: float32}}\n"
    (tmp_path / "encode.yaml").write_text(config)
    arguments = {
        "config": tmp_path / "encode.yaml",
        "data": tmp_path / "crops/manifest.json",
        "codec-weights": weights / "weights.safetensors",
        "output": tmp_path / "latents/manifest.json",
    }
    command = [text for name, path in arguments.items() for text in (f"--{name}", str(path))]
    monkeypatch.setattr(sys, "argv", ["encode", *command])
    encode.main()
    latents = open_shards(tmp_path / "latents", "all")
    assert latents.manifest["precision"] == precision
    expected = built(weights, dtype).encode(open_shards(tmp_path / "crops", "all").gather(np.arange(5)))
    assert torch.equal(latents.gather(np.arange(5)), expected)
