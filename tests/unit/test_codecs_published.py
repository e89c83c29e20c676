"""Autoencoders of diffusers: encoding, measured normalisation, training and decoding match direct calls."""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.codecs.diffusers import Diffusers, StabilityVae
from image_diffusion.codecs.diffusers_families import Factors, Rae, as_declared
from image_diffusion.codecs.tokens import TokensOf
from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run
from tiny_autoencoders import SHAPES, without_transformers, write_autoencoder

CPU, F32 = torch.device("cpu"), torch.float32
RGB = DataSpec(channels=3, resolution=32)
LATENTS = ("kl4", "kl16", "flux2", "dc", "rae", "vq")


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of 24 different images of two classes."""
    root = tmp_path_factory.mktemp("crops")
    generator = np.random.default_rng(0)
    for number in range(24):
        path = root / f"in/{'ab'[number % 2]}/{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((32, 32)).save(path)
    source: Any = {"type": "folder", "path": str(root / "in")}
    crop_dataset(DataConfig(name="x", source=source, resolution=32, num_shards=2), root / "crops")
    return root / "crops"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Function from the name of a tiny autoencoder to its folder and the model."""
    root = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        without_transformers(patch)
        yield cache(lambda name: (root / name, write_autoencoder(name, root / name)))


def test_missing_transformers_is_named_in_the_message() -> None:
    if importlib.util.find_spec("transformers") is None:
        with pytest.raises(
            ValueError, match=r"needs the package transformers. Install it: pip install 'image-diffusion\[text\]'"
        ):
            Rae.network()


def encoded(crops: Path, output: Path, codec: Diffusers, parts: int = 1) -> dict[str, Any]:
    settings = EncodeConfig(batch_size=12, dtype="float32", precision="float32")
    for part in range(parts):
        encode_shards(crops, output, codec.build(None, None, CPU, F32), settings, CPU, (part, parts))
    return write_manifest(crops, output, codec.build(None, None, CPU, F32), settings)


def by_hand(name: str, vae: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latent and reconstruction by calling the model as its own pipeline does."""
    x = from_uint8(images)
    with torch.no_grad():
        match name:
            case "kl4" | "kl16" | "flux2":
                latent = vae.encode(x).latent_dist.mean
                decoded = vae.decode(latent).sample
            case "rae":
                latent = vae.encode(images / 255).latent
                return latent, (vae.decode(latent).sample * 255).round().clamp(0, 255).to(torch.uint8)
            case "dc":
                latent = vae.encode(x).latent
                decoded = vae.decode(latent).sample
            case _:
                latent = vae.encode(x).latents
                decoded = vae.decode(latent).sample
    if name == "flux2":  # pipeline_flux2.py, _patchify_latents
        latent = torch.stack([latent[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)], dim=2).flatten(
            1, 2
        )
    return latent, to_uint8(decoded)


@pytest.mark.parametrize("name", [*LATENTS, "tiny"])
def test_latents_equal_direct_calls_of_the_model(name: str, written: Any) -> None:
    folder, vae = written(name)
    settings = Diffusers(weights=str(folder))
    channels, downsampling = SHAPES[name]
    spec = settings.spec(RGB, None)
    assert (spec.channels, spec.resolution) == (channels, 32 // downsampling)
    statistics = {
        "mean": torch.randn(channels).tolist(), "std": (torch.rand(channels) + 0.5).tolist(),
        "global_mean": 0.0, "global_std": 1.0, "declared": {"mean": [0.0], "std": [1.0]},
    }  # fmt: skip
    codec = settings.build(None, settings.scale_of(statistics), CPU, F32)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    latent, decoded = by_hand(name, vae, images)
    stored = codec.encode(images)
    assert stored.shape[1:] == (2 if "kl" in name or name == "flux2" else 1, spec.channels, *[spec.resolution] * 2)
    assert torch.allclose(stored[:, 0], latent, atol=1e-5)
    x = codec.normalise(latent)
    assert torch.allclose(Factors(statistics["mean"], statistics["std"]).restore(x), latent, atol=1e-5)  # type: ignore[arg-type]
    assert (codec.decode(x).int() - decoded.int()).abs().max() <= 1


@pytest.mark.parametrize("name", LATENTS)
def test_network_is_trained_on_latents_and_sampled(name: str, written: Any, crops: Path, tmp_path: Path) -> None:
    folder, _ = written(name)
    manifest = encoded(crops, tmp_path / "latents", Diffusers(weights=str(folder)))
    config = tmp_path / "train.yaml"
    config.write_text(
        to_yaml(
            {
                "experiment": "x",
                "codec": {"type": "diffusers", "weights": str(folder)},
                "system": {"type": "dit", "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 1}},
                "preview": {},
                "train": {"steps": 1, "global_batch": 8, "validate_every_steps": None, "grid_every_steps": None},
            }
        )
    )
    training = prepare_training(config, tmp_path / "latents/manifest.json", None)
    data = open_shards(tmp_path / "latents", "train")
    everything = np.arange(data.num_samples)
    both = [data.gather(everything, np.full(data.num_samples, flip)) for flip in (False, True)]
    drawn = []
    for epoch in range(8):
        streams = Streams(0, torch.full((2 * data.num_samples,), epoch), torch.arange(2 * data.num_samples))
        labels = torch.zeros(2 * data.num_samples, dtype=torch.int64)
        drawn.append(training.task(training.network()).prepare(torch.cat(both), labels, streams).x)
    x = torch.stack(drawn)
    assert x.mean(dim=(0, 1, 3, 4)).abs().max() < 0.02
    assert (x.var(dim=(0, 1, 3, 4), correction=0).sqrt() - 1).abs().max() < 0.02

    run(training.build, training.stage.train, training.model, training.data, tmp_path / "train")
    model = load_model(tmp_path / "train")
    assert model.codec["scale"]["mean"] == manifest["statistics"]["mean"]
    codec = load_codec(model, None, CPU)
    settings = SampleConfig.model_validate({"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 1}})
    images = Generator(model.network, model.system.reading, model.spec, codec, settings)(  # type: ignore[arg-type]
        torch.arange(2), torch.zeros(2, dtype=torch.int64)
    )
    assert images.shape == (2, 3, 32, 32) and images.dtype == torch.uint8


def test_parts_encoded_in_parallel_share_statistics(written: Any, crops: Path, tmp_path: Path) -> None:
    codec = Diffusers(weights=str(written("kl16")[0]))
    assert encoded(crops, tmp_path / "one", codec) == encoded(crops, tmp_path / "two", codec, parts=2)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize("name", ["kl4", "kl16", "flux2", "dc"])
def test_declared_factors_equal_those_of_diffusers_pipelines(
    name: str, written: Any, crops: Path, tmp_path: Path
) -> None:
    folder, vae = written(name)
    settings = Diffusers(weights=str(folder), normalisation="declared")
    statistics = encoded(crops, tmp_path, settings)["statistics"]
    latent = torch.randn(2, SHAPES[name][0], 4, 4)
    if name == "flux2":  # pipeline_flux2.py, _encode_vae_image
        mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        expected = (latent - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
    else:
        expected = (latent - (vae.config.get("shift_factor") or 0)) * vae.config.scaling_factor
    codec = settings.build(None, settings.scale_of(statistics), CPU, F32)
    assert torch.allclose(codec.normalise(latent), expected, atol=1e-5)


def test_latents_mean_and_std_are_used_as_in_the_sdxl_pipeline(written: Any, tmp_path: Path) -> None:
    shutil.copytree(written("kl4")[0], tmp_path / "vae")
    mean, std = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    change(tmp_path / "vae", latents_mean=mean, latents_std=std)
    latent = torch.randn(1, 4, 2, 2)
    found = Diffusers(weights=str(tmp_path / "vae")).kind.declared(None)
    x = found.normalise(latent)
    restored = x * torch.tensor(std).view(1, 4, 1, 1) / 0.25 + torch.tensor(mean).view(1, 4, 1, 1)
    assert torch.allclose(restored, latent, atol=1e-6)


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_wrong_factors_give_advice_and_changed_factors_change_the_identity(
    written: Any, crops: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vae"
    shutil.copytree(written("kl4")[0], folder)
    codec = Diffusers(weights=str(folder))
    statistics = encoded(crops, tmp_path / "before", codec)["statistics"]
    change(folder, scaling_factor=1 / statistics["global_std"], shift_factor=statistics["global_mean"])
    statistics = encoded(crops, tmp_path / "latents", codec)["statistics"]
    assert codec.advice(statistics) is None
    assert as_declared(statistics, Factors(**statistics["declared"])) == pytest.approx((0, 1), abs=1e-6)
    written_by = codec.build(None, None, CPU, F32).identity
    change(folder, scaling_factor=1.25 / statistics["global_std"])
    statistics = encoded(crops, tmp_path / "latents", codec)["statistics"]
    advice = codec.advice(statistics)
    assert advice is not None and "have mean 0.00 and standard deviation 1.25 over this data set" in advice
    assert codec.build(None, None, CPU, F32).identity != written_by  # so that existing shards and models are rejected


@pytest.mark.parametrize("codec", [Diffusers, StabilityVae])
def test_codec_identity_depends_on_folder_content_but_not_its_path(
    written: Any, tmp_path: Path, codec: type[Diffusers] | type[StabilityVae]
) -> None:
    folder, _ = written("sd")
    shutil.copytree(folder, tmp_path / "elsewhere")

    def identity(path: Path) -> dict[str, Any]:
        return codec(weights=str(path)).build(None, None, CPU, F32).identity

    assert identity(folder) == identity(tmp_path / "elsewhere")
    path = tmp_path / "elsewhere/diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert identity(folder) != identity(tmp_path / "elsewhere")


def test_another_decoder_of_the_same_latents_decodes_them(written: Any, tmp_path: Path) -> None:
    folder, vae = written("kl4")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    change(other, scaling_factor=0.5)  # its pipeline works on latents that are half as large
    settings = Diffusers(weights=str(folder))
    statistics = {"mean": [1.0] * 4, "std": [2.0] * 4, "global_std": 2.0, "declared": {"mean": [0.0], "std": [4.0]}}
    codec = settings.build(None, settings.scale_of(statistics), CPU, F32)
    x = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        expected = to_uint8(vae.decode((x * 2 + 1) / 4 / 0.5).sample)
    assert (codec.with_decoder(str(other), CPU).decode(x).int() - expected.int()).abs().max() <= 1
    settings.check_decoder("sample.decoder", str(other))
    with pytest.raises(ValueError, match="which decodes latents of 16 channels and 1/2 of an image's edge, but those"):
        settings.check_decoder("sample.decoder", str(written("kl16")[0]))


def test_tokens_of_a_vq_model_are_its_codes(written: Any) -> None:
    folder, vae = written("vq")
    tokens = Diffusers(weights=str(folder)).tokens(None, CPU, F32)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    codes = tokens.encode(images)
    with torch.no_grad():
        expected = vae.decode(vae.encode(from_uint8(images)).latents).sample
    assert codes.shape == (2, 16, 16) and tokens.num_tokens == 16
    assert (tokens.decode(codes).int() - to_uint8(expected).int()).abs().max() <= 1
    with pytest.raises(ValueError, match="has no codebook"):
        Diffusers(weights=str(written("kl4")[0])).tokens(None, CPU, F32)


def test_tokens_of_a_vq_model_form_a_codec(written: Any) -> None:
    folder, _ = written("vq")
    chosen = TokensOf.model_validate({"of": {"type": "diffusers", "weights": str(folder)}})
    images = DataSpec(channels=3, resolution=32, num_classes=2)
    assert chosen.spec(images, None) == DataSpec(channels=16, resolution=16, num_classes=2)
    codec = chosen.build(None, None, CPU, F32)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    stored = codec.encode(pixels).short()
    x = codec.draw(stored, Streams(0, torch.arange(2), torch.arange(2)))
    assert x.dtype == torch.int64 and torch.equal(x, stored.long()) and codec.decode(x).shape == pixels.shape
    assert codec.identity == chosen.of.tokens(None, CPU, F32).identity and codec.identity["type"] == "vq_tokens"
    with pytest.raises(ValueError, match="has no tokens"):
        TokensOf.model_validate({"of": {"type": "diffusers", "weights": str(written("kl4")[0])}}).spec(images, None)


def test_unsuitable_autoencoders_are_rejected_from_config_json_alone(written: Any, tmp_path: Path) -> None:
    def refused(match: str, images: DataSpec = RGB, **changes: Any) -> None:
        name = changes.pop("name", "kl4")
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        shutil.copy(written(name)[0] / "config.json", folder)  # no weights
        change(folder, **changes)
        with pytest.raises(ValueError, match=match) as caught:
            Diffusers(weights=str(folder)).spec(images, None)
        assert "\n" not in str(caught.value)

    refused(
        "data.resolution is 33, but the codec divides each edge by 2. Choose", RGB.model_copy(update={"resolution": 33})
    )
    refused("data.channels is 1, but the autoencoder .* reads 3. Set it to 3", RGB.model_copy(update={"channels": 1}))
    refused("decodes to 32 alone. Set it to 32", RGB.model_copy(update={"resolution": 64}), name="rae")
    refused("holds a AutoencoderKLWan, which is not supported", _class_name="AutoencoderKLWan")
    with pytest.raises(ValueError, match="holds no config.json. Its folders vae do: name one"):
        shutil.copytree(written("kl4")[0], tmp_path / "pipeline/vae")
        Diffusers(weights=str(tmp_path / "pipeline")).spec(RGB, None)
    assert Diffusers(weights=str(tmp_path / "pipeline"), subfolder="vae").spec(RGB, None).channels == 4


def test_stability_vae_rejects_other_autoencoders(written: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 channels at 1/2 of the edge.* Use codec: {type: diffusers"):
        StabilityVae(weights=str(written("kl16")[0])).spec(RGB, None)
    with pytest.raises(ValueError, match="is not Stable Diffusion 1's autoencoder"):  # without the check, when loaded
        StabilityVae(weights=str(written("kl16")[0])).build(None, None, CPU, F32).encode(torch.zeros(1, 3, 32, 32))
    sdxl = tmp_path / "sdxl"
    sdxl.mkdir()
    shutil.copy(written("kl4")[0] / "config.json", sdxl)
    change(sdxl, block_out_channels=[8, 8, 8, 8], scaling_factor=0.13025)
    with pytest.raises(ValueError, match="and factors of its own. Use codec"):
        StabilityVae(weights=str(sdxl)).spec(RGB, None)
    assert StabilityVae(weights=str(sdxl), scale=0.2).spec(RGB, None).channels == 4
    change(sdxl, scaling_factor=0.18215)
    assert StabilityVae(weights=str(sdxl)).spec(RGB, None).channels == 4
    advice = StabilityVae().advice({"mean": [0.0] * 4, "std": [1 / 0.13025] * 4})
    assert advice is not None and "standard deviation 1.40" in advice
