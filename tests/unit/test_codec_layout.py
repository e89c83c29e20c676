"""Memory layout of autoencoders: channels last on a GPU, with the outputs of any other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from image_diffusion.codecs import base as codecs
from image_diffusion.codecs.base import Codec, layout_on
from image_diffusion.codecs.diffusers import Diffusers
from image_diffusion.codecs.trained import Trained
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from tiny_autoencoders import SHAPES, without_transformers, write_autoencoder

CPU = torch.device("cpu")
SPEC = DataSpec(channels=3, resolution=32)
TRAINED: dict[str, Config] = {
    "kl": AutoencoderSystem(network=AutoencoderConfig(block_channels=(8, 16), norm_groups=4)),
    "dvae": DVAESystem(network=DVAEConfig(num_tokens=6, codebook_dim=5, num_resnet_blocks=1, hidden_dim=8)),
}


def test_gpu_uses_channels_last_and_cpu_preserves_layout() -> None:
    assert layout_on(torch.device("cuda", 1)) is torch.channels_last
    assert layout_on(CPU) is torch.preserve_format


@pytest.mark.parametrize("convolution", [F.conv2d, F.conv_transpose2d])
def test_gpu_convolution_output_follows_weight_layout(convolution: Callable[..., Tensor]) -> None:
    with FakeTensorMode():
        x, weight = torch.randn(2, 8, 16, 16, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda")
        laid_out = weight.to(memory_format=layout_on(weight.device))
        assert convolution(x, weight).is_contiguous()
        assert convolution(x, laid_out).is_contiguous(memory_format=torch.channels_last)


def built(name: str, folder: Path) -> Codec:
    """Load a tiny codec by name from a folder."""
    if name not in TRAINED:
        return Diffusers(weights=str(folder)).build(None, None, CPU, torch.float32)
    return Trained(experiment="x").build(folder, None, CPU, torch.float32)


def written(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    if name in TRAINED:
        system: Any = TRAINED[name]
        save_weights(folder, system.network.build(SPEC).state_dict(), {"system": dump(system), "spec": dump(SPEC)})
    else:
        write_autoencoder(name, folder)
    return folder


def network_of(codec: Any) -> nn.Module:
    found: nn.Module = codec.packed().network
    return found


def laid_out(network: nn.Module) -> list[bool]:
    """Return, per convolution over several pixels, whether its weights are channels-last."""
    weights = [
        each.weight for each in network.modules() if isinstance(each, nn.Conv2d) and each.weight[0, 0].numel() > 1
    ]
    return [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights if weight.shape[1] > 1]


@pytest.mark.parametrize("name", [*SHAPES, *TRAINED])
def test_codec_outputs_do_not_depend_on_memory_layout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(monkeypatch)
    folder = written(name, tmp_path / name)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found: list[tuple[Tensor, Tensor]] = []
    for layout in (torch.preserve_format, torch.channels_last):
        monkeypatch.setattr(codecs, "layout_on", lambda device, layout=layout: layout)
        codec = built(name, folder)
        moments = codec.encode(images)
        found.append((moments, codec.decode(codec.normalise(moments[:, 0]))))
        assert found[-1][1].is_contiguous()
        of_each = laid_out(network_of(codec))
        assert of_each and all(of_each) == any(of_each) == (layout is torch.channels_last)
    (moments, pixels), (same, seen) = found
    torch.testing.assert_close(same, moments, rtol=1e-5, atol=1e-5)
    assert (seen.int() - pixels.int()).abs().max() <= 1
