"""Codecs: images survive encoding and decoding, and a wrong codec is rejected."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.codecs.diffusers import StabilityVae
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.codecs.trained import Trained
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.objectives.autoencoding import Autoencoding
from image_diffusion.stages import encode as encoding
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem

CPU, F32 = torch.device("cpu"), torch.float32
SMALL = AutoencoderConfig(block_channels=(8, 16), norm_groups=4)
SPEC = DataSpec(channels=3, resolution=16)
LEVELS = Levels(dtype="uint16", channels=("a", "b", "c"), low=(0, 0, 0), high=(255, 255, 255))


def streams(count: int) -> Streams:
    ids = torch.arange(count)
    return Streams(0, torch.zeros_like(ids), ids)


def trained(folder: Path, levels: Levels | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    network = SMALL.build(SPEC)
    system, spec = AutoencoderSystem(network=SMALL), SPEC.model_copy(update={"levels": levels})
    save_weights(folder, network.state_dict(), {"system": dump(system), "spec": dump(spec)})
    return network


def test_every_pixel_value_survives_the_round_trip_to_network_input() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(from_uint8(pixels)), pixels)
    images = pixels.view(1, 1, 16, 16)
    assert torch.equal(Rgb().decode(Rgb().draw(images, streams(1))), images)


def test_a_trained_codec_gives_the_moments_of_its_network(tmp_path: Path) -> None:
    network = trained(tmp_path)
    codec = Trained(experiment="x").build(tmp_path, 0.5, CPU, F32)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        posterior = network.vae.encode(from_uint8(images)).latent_dist
    moments = codec.encode(images)
    assert moments.shape == (2, 2, 4, 8, 8)
    assert torch.allclose(moments[:, 0], posterior.mean) and torch.allclose(moments[:, 1], posterior.std)
    with torch.no_grad():
        expected = to_uint8(network.vae.decode(posterior.mean).sample)
    assert (codec.decode(posterior.mean * 0.5).int() - expected.int()).abs().max() <= 1


def test_a_drawn_latent_has_the_stored_mean_and_deviation_times_the_scale(tmp_path: Path) -> None:
    trained(tmp_path)
    codec = Trained(experiment="x").build(tmp_path, 0.25, CPU, F32)
    stored = torch.stack([torch.full((4, 8, 8), 3.0), torch.full((4, 8, 8), 2.0)]).to(torch.float16)
    x = codec.draw(stored.expand(500, -1, -1, -1, -1), streams(500))
    n = x.numel()
    assert (x.mean() / 0.25 - 3).abs() < 5 * 2 / n**0.5 and (x.std() / 0.25 - 2).abs() < 5 * 2 / (2 * n) ** 0.5


def test_a_folder_that_holds_no_codec_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, {"a": torch.zeros(1)}, {"system": {"type": "dit"}, "spec": dump(SPEC)})
    with pytest.raises(ValueError, match="was trained by a dit, which is not a codec"):
        Trained(experiment="x").build(tmp_path, None, CPU, F32)


def test_the_full_sized_autoencoder_is_read_from_a_local_folder(tmp_path: Path) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
    )
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863
    vae.save_pretrained(tmp_path / "vae")
    codec = StabilityVae(weights=str(tmp_path / "vae")).build(None, None, CPU, F32)
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = vae.eval().encode(from_uint8(images)).latent_dist.mean
    moments = codec.encode(images)
    assert moments.shape == (1, 2, 4, 4, 4) and torch.allclose(moments[:, 0], expected, atol=1e-5)
    assert codec.scale == 0.18215 and codec.decode(moments[:, 0] * codec.scale).shape == images.shape


def test_other_decoder_requires_the_scaling_factor_of_its_weights(tmp_path: Path) -> None:
    settings = {"_class_name": "AutoencoderKL", "in_channels": 3, "latent_channels": 4, "block_out_channels": [8] * 4}
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))  # as in diffusers before scaling_factor existed: 0.18215
    StabilityVae(weights=str(folder)).check_decoder("sample.decoder", str(folder))
    assert StabilityVae(weights=str(folder)).spec(SPEC, None).channels == 4
    with pytest.raises(ValueError, match="sample.decoder is set, but codec.scale is 0.3 and not the 0.18215 of"):
        StabilityVae(weights=str(folder), scale=0.3).check_decoder("sample.decoder", str(folder))
    (folder / "config.json").write_text(json.dumps(settings | {"scaling_factor": 0.3}))
    StabilityVae(weights=str(folder), scale=0.3).check_decoder("sample.decoder", str(folder))


def test_missing_hub_error_names_the_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    codec = StabilityVae(weights="stabilityai/no-such-vae").build(None, None, CPU, F32)
    with pytest.raises(ValueError, match="set codec.weights to its path"):
        codec.encode(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("codec", "images", "message"),
    [
        (StabilityVae(), DataSpec(channels=3, resolution=36), "Choose a multiple of 8"),
        (StabilityVae(), DataSpec(channels=1, resolution=32), "reads RGB"),
        (Trained(experiment="x"), DataSpec(channels=3, resolution=31), "Choose a multiple of 2"),
    ],
)
def test_unsuitable_images_are_rejected_before_any_work(codec: StabilityVae, images: DataSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.spec(images, SMALL)


def test_pixels_have_no_latents() -> None:
    with pytest.raises(ValueError, match="nothing to encode|has no latents"):
        Rgb().encode(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_small_autoencoder_loss_is_reconstruction_error_plus_kl_divergence() -> None:
    """KL(N(m, v) || N(0, 1)) = (m^2 + v - 1 - log v) / 2 (Kingma and Welling 2014, appendix B)."""
    x = torch.rand(3, 3, 4, 4)

    def network(images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert noise.shape == (3, 2, 2, 2)
        return images + 0.5, torch.full_like(noise, 2.0), torch.full_like(noise, math.log(3.0))

    losses = Autoencoding(0.1, (2, 2, 2))(network, Batch(x, {}, streams(3)))
    divergence = (4 + 3 - 1 - math.log(3.0)) / 2
    torch.testing.assert_close(losses.parts, {"mse": torch.full((3,), 0.25), "kl": torch.full((3,), divergence)})
    torch.testing.assert_close(losses.loss, torch.full((3,), 0.25 + 0.1 * divergence))


@pytest.mark.parametrize("levels", [None, LEVELS])
def test_encode_makes_reconstructions_in_its_batch_size(
    levels: Levels | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, levels)
    codec = Trained(experiment="x").build(tmp_path, 0.5, CPU, F32)
    images = torch.randint(0, 256, (40, 3, 16, 16)).to(torch.uint8 if levels is None else torch.uint16)
    sizes: list[int] = []
    encode, decode = codec.encode, codec.decode

    def counted(do: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda tensor: (sizes.append(len(tensor)), do(tensor))[1]

    monkeypatch.setitem(vars(codec), "encode", counted(encode))
    monkeypatch.setitem(vars(codec), "decode", counted(decode))
    crops = SimpleNamespace(num_samples=40, levels=levels, gather=lambda rows: images[torch.from_numpy(rows)])
    monkeypatch.setattr(encoding, "open_shards", lambda *_: crops)
    for batch_size, expected in ((16, [16, 16]), (6, [6, 6, 6, 6, 4, 4])):
        sizes.clear()
        encoding.show_reconstructions(tmp_path, codec, batch_size, CPU, tmp_path / f"{batch_size}.png")
        assert sizes == expected
    assert (tmp_path / "16.png").read_bytes() == (tmp_path / "6.png").read_bytes()
