"""The discrete VAE as a codec of other experiments, and the reconstruction metrics reported during its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.codecs.trained import DVAECodec, Trained
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import load_all
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.systems.base import Others
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.codec.reconstruction import show_reconstructions

CPU, F32 = torch.device("cpu"), torch.float32
SMALL = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=2, num_resnet_blocks=1, hidden_dim=8)
SPEC = DataSpec(channels=3, resolution=16)


def network_of() -> DVAE:
    torch.manual_seed(0)
    return SMALL.build(SPEC)


def images_of(count: int) -> torch.Tensor:
    ids = torch.arange(count)
    return Streams(0, torch.zeros_like(ids), ids).integers("images", 256, (3, 16, 16)).to(torch.uint8)


def test_trained_codec_encodes_to_expected_embeddings_and_decodes_them(tmp_path: Path) -> None:
    network = network_of()
    save_weights(tmp_path, network.state_dict(), {"system": dump(DVAESystem(network=SMALL)), "spec": dump(SPEC)})
    codec = Trained(experiment="x").build(tmp_path, 0.5, CPU, F32)
    assert isinstance(codec, DVAECodec) and codec.identity["type"] == "dvae"
    images = images_of(3)
    moments = codec.encode(images)
    x = from_uint8(images)
    with torch.no_grad():
        q = torch.softmax(network.encoder(x), dim=1)
        expected = (q.unsqueeze(2) * network.codebook.weight.view(1, 6, 5, 1, 1)).sum(1)
        pixels = to_uint8(network.decoder(expected))
    assert moments.shape == (3, 2, 5, 4, 4)
    torch.testing.assert_close(moments[:, 0], expected)
    assert torch.equal(moments[:, 1], torch.zeros(3, 5, 4, 4))
    ids = torch.arange(3)
    drawn = codec.draw(moments.to(torch.float16), Streams(0, ids, ids))
    torch.testing.assert_close(drawn, expected.half().float() * 0.5)
    assert (codec.decode(expected * 0.5).int() - pixels.int()).abs().max() <= 1


def test_decoded_tokens_equal_hard_reconstructions(tmp_path: Path) -> None:
    network = network_of()
    save_weights(tmp_path, network.state_dict(), {"system": dump(DVAESystem(network=SMALL)), "spec": dump(SPEC)})
    tokens = Trained(experiment="x").tokens(tmp_path, CPU, F32)
    assert tokens.num_tokens == 6 and tokens.identity["type"] == "dvae_tokens"
    images = images_of(3)
    found = tokens.encode(images)
    assert torch.equal(found, network.indices(from_uint8(images))) and found.shape == (3, 4, 4)
    expected = to_uint8(network.reconstructions(from_uint8(images))[0]["hard"])
    assert torch.equal(tokens.decode(found.to(torch.int16)), expected)
    other = tmp_path / "other"
    autoencoder = AutoencoderConfig(block_channels=(8, 16), norm_groups=4)
    weights = autoencoder.build(SPEC).state_dict()
    save_weights(other, weights, {"system": dump(AutoencoderSystem(network=autoencoder)), "spec": dump(SPEC)})
    with pytest.raises(ValueError, match="trains no discrete VAE"):
        Trained(experiment="x").tokens(other, CPU, F32)


def experiments(**changes: Any) -> tuple[Experiment, Experiment]:
    """A DiT, and the discrete VAE that encodes its training latents."""
    data = {"name": "digits", "source": {"type": "digits"}, "resolution": 16}
    vae = {"data": data, "system": {"type": "dvae", "network": dump(SMALL) | changes}, "train": {"steps": 1}}
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 2}
    dit = {"codec": {"type": "trained", "experiment": "vae"}, "system": {"type": "dit", "network": network}}
    return parse_experiment(vae | dit, "dit.yaml"), parse_experiment(vae, "vae.yaml")


def test_diffusion_experiment_trains_on_dvae_latents() -> None:
    dit, vae = experiments()
    check_experiment(vae, Others())
    check_experiment(dit, Others(codec=vae))
    images = DataSpec(channels=3, resolution=16, num_classes=10)
    assert dit.codec.spec(images, SMALL) == DataSpec(channels=5, resolution=4, num_classes=10)
    with pytest.raises(ValueError, match="patches of 2"):
        dit, vae = experiments(num_layers=4)
        check_experiment(dit, Others(codec=vae))
    with pytest.raises(ValueError, match="codec is set, but a system of type dvae has no use for it. Leave it out."):
        raw = {name: dump(vae)[name] for name in ("data", "system", "train")}
        parse_experiment(raw | {"codec": {"type": "trained", "experiment": "vae"}}, "vae.yaml")


def test_training_reports_psnr_and_codebook_use(tmp_path: Path) -> None:
    network, images = network_of(), images_of(20)
    found = show_reconstructions(network, images, 7, tmp_path, 3)
    whole = show_reconstructions(network, images, 20, tmp_path / "whole", 3)
    x = from_uint8(images)
    with torch.no_grad():
        indices = network.indices(x)
        hard = to_uint8(network.decode(network.hard_latent(indices)))
    errors = (hard.double() - images.double()).square().mean((1, 2, 3))
    assert found["psnr_hard"] == pytest.approx((10 * torch.log10(255**2 / errors)).mean().item())
    used, counts = np.unique(indices.numpy(), return_counts=True)
    p = counts / counts.sum()
    assert found["codebook_usage"] == len(used) / 6 and found["dead_codes"] == 6 - len(used)
    assert found["codebook_perplexity"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    numbers = {
        "psnr_soft",
        "psnr_hard",
        "ssim_soft",
        "ssim_hard",
        "codebook_usage",
        "dead_codes",
        "codebook_perplexity",
    }
    assert set(found) == numbers | {"reconstructions", "codebook"}
    for name in numbers:
        assert found[name] == pytest.approx(whole[name]), "batches change nothing"
    for name in ("reconstructions", "codebook"):
        path = found[name]
        assert isinstance(path, Path)
        with Image.open(path) as picture:
            assert picture.width > 100
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_reconstructions_are_decoded_in_batches_of_the_given_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, sizes = network_of(), []
    decode = network.decode
    monkeypatch.setattr(network, "decode", lambda latent: sizes.append(len(latent)) or decode(latent))
    show_reconstructions(network, images_of(20), 3, tmp_path, 0)
    assert max(sizes) == 3


def test_autoencoder_reports_reconstruction_metrics_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = AutoencoderConfig(block_channels=(8, 16), norm_groups=4).build(SPEC)
    found = show_reconstructions(network, images_of(3), 2, tmp_path, 0)
    assert set(found) == {"psnr_mean", "ssim_mean", "reconstructions"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"resolution": 24}}, "The resolution is 24, but a discrete VAE needs a power of two"),
        ({"data": {"resolution": 2}}, "too small for num_layers = 2, which divide each edge by 4"),
        ({"system": {"objective": {"temperature": {"start": 0}}}}, "temperature.start is 0: input should be greater"),
        ({"system": {"objective": {"temperature": {"final": -1}}}}, "temperature.final is -1: input should be greater"),
        ({"system": {"objective": {"temperature": {"final": 2}}}}, "final is 2.0, above start = 1.0"),
        ({"encode": {"precision": "bf16"}}, "encode.precision is set, but encode.tokens is not: nothing is encoded"),
        ({"system": {"network": {"mean": [0.5]}}}, "mean has 1 values, but the images have 3 channels"),
    ],
)
def test_a_mistake_is_one_clear_line_before_any_work(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    text = {"data": {"name": "digits", "source": {"type": "digits"}, "resolution": 16}, "train": {"steps": 1}}
    text |= {"system": {"type": "dvae", "network": {"num_layers": 2}}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(_merged(text, changes)))
    with pytest.raises(ValueError, match=message) as told:
        load_all([path])
    assert len(str(told.value).splitlines()) == 1


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(first.get(key, {}), value) for key, value in second.items() if isinstance(value, dict)}
    return first | second | nested


def test_trained_network_rejects_images_with_other_channels() -> None:
    with pytest.raises(
        ValueError, match=r"Images have shape \[4, 16, 16\] but the network was built for \[3, 16, 16\]"
    ):
        network_of().logits(torch.zeros(1, 4, 16, 16))
