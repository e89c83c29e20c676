"""Evaluation of a codec: metrics, their floors, pictures and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features import base as features
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.images.reconstruction import psnr
from image_diffusion.metrics.samples import Samples
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.systems.codec.reconstruction import evaluate_codec, reconstruct

SPEC = DataSpec(channels=3, resolution=16)


class Brightness:
    """Detector of the mean brightness of an image's quarters, with classes dark and bright."""

    classes = ["dark", "bright"]  # noqa: RUF012
    identity: dict[str, Any] = {"name": "test"}  # noqa: RUF012
    doubt: str | None = None

    def __call__(self, images: Tensor) -> Detected:
        quarters = nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
        level = quarters.mean(dim=1, keepdim=True)
        return Detected(quarters, torch.cat([0.5 - level, level - 0.5], dim=1))

    def metric_name(self, metric: str) -> str:
        return f"test_{metric}"


def images(count: int, seed: int) -> Samples:
    labels = np.arange(count) % 2
    noise = np.random.default_rng(seed).integers(0, 128, (count, 16, 16, 3))
    return Samples((noise + 127 * labels[:, None, None, None]).astype(np.uint8), labels, Brightness.classes, "set")


@pytest.fixture(scope="module")
def data() -> RealImages:
    return RealImages(images(200, 0), images(120, 1))


def dvae() -> nn.Module:
    torch.manual_seed(0)
    config = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=2, num_resnet_blocks=1, hidden_dim=8)
    return config.build(SPEC).eval()


def test_discrete_vae_metrics_and_pictures(data: RealImages, tmp_path: Path) -> None:
    network = dvae()
    result = evaluate_codec(network, data, [Brightness()], EvaluateConfig(), tmp_path / "a")
    metrics = result["metrics"]
    named = {"psnr", "ssim", "test_reconstruction_fd", "test_same_class", "test_agreement"}
    assert set(metrics) == {f"{name}_{way}" for name in named for way in ("soft", "hard")} | {
        "codebook_usage",
        "codebook_perplexity",
        "dead_codes",
    }
    held_out = data.validation.gather(np.arange(120))
    with torch.no_grad():
        tokens = network.indices(from_uint8(held_out))
        hard = to_uint8(network.decode(network.hard_latent(tokens)))
    each = psnr(held_out, hard)
    assert metrics["psnr_hard"]["value"] == pytest.approx(each.mean().item())
    low, high = metrics["psnr_hard"]["interval"]
    assert low < each.mean() < high and metrics["psnr_hard"]["n"] == 120
    assert metrics["dead_codes"]["value"] == 6 - len(tokens.unique())
    assert metrics["test_agreement_hard"]["floor"] == 1.0  # of the originals
    assert metrics["test_reconstruction_fd_hard"]["floor_n"] == 120  # real images against real images
    assert metrics["test_reconstruction_fd_hard"]["ratio"] > 10  # nothing was trained
    assert result["protocol"]["reference"] == {"split": "validation", "data": "set", "num_images": 120}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"reconstructions.png", "worst.png", "codebook.png"}
    again = evaluate_codec(network, data, [Brightness()], EvaluateConfig(), tmp_path / "b")
    write_json(tmp_path / "a.json", result)
    write_json(tmp_path / "b.json", again)
    for name in (".json", "/worst.png", "/codebook.png"):
        assert (tmp_path / f"a{name}").read_bytes() == (tmp_path / f"b{name}").read_bytes()


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_feature_batch_size_changes_no_metric(data: RealImages, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, found = dvae(), []
    for each in (16, at_once):
        monkeypatch.setattr(features, "AT_ONCE", each)
        found.append(evaluate_codec(network, data, [Brightness()], EvaluateConfig())["metrics"])
    expected, found = found
    for name, entry in expected.items():
        assert found[name]["value"] == pytest.approx(entry["value"], rel=1e-6), name
        assert found[name]["interval"] == pytest.approx(entry["interval"], rel=1e-6), name


def test_small_autoencoder_has_the_same_metrics_and_pictures(data: RealImages, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = AutoencoderConfig(block_channels=(8, 16), norm_groups=4).build(SPEC).eval()
    result = evaluate_codec(network, data, [Brightness()], EvaluateConfig(), tmp_path)
    assert {"psnr_mean", "ssim_mean", "test_reconstruction_fd_mean"} <= set(result["metrics"])
    assert {path.name for path in tmp_path.iterdir()} == {"reconstructions.png", "worst.png"}


def test_images_too_low_for_ssim_report_psnr_alone() -> None:
    network = AutoencoderConfig(block_channels=(8, 16), norm_groups=4).build(DataSpec(channels=3, resolution=[8, 32]))
    quality = reconstruct(network, torch.zeros(2, 3, 8, 32, dtype=torch.uint8)).quality()
    assert set(quality) == {"psnr_mean"}


def test_without_held_out_images_the_protocol_states_the_train_split() -> None:
    data = RealImages(images(150, 0), images(0, 1))
    result = evaluate_codec(dvae(), data, [Brightness()], EvaluateConfig())
    assert result["protocol"]["reference"]["split"] == "train"
    assert result["metrics"]["test_reconstruction_fd_hard"]["floor"] is None


def test_mismatched_shapes_and_empty_data_are_rejected(data: RealImages) -> None:
    other = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=2, hidden_dim=8).build(
        DataSpec(channels=4, resolution=16)
    )
    with pytest.raises(ValueError, match=r"shape \[3, 16, 16\] but the network was built for \[4, 16, 16\]"):
        evaluate_codec(other, data, [Brightness()], EvaluateConfig())
    small = AutoencoderConfig(block_channels=(8, 16), norm_groups=4).build(DataSpec(channels=3, resolution=32))
    with pytest.raises(ValueError, match=r"the network was built for \[3, 32, 32\]"):
        evaluate_codec(small, data, [Brightness()], EvaluateConfig())
    with pytest.raises(ValueError, match="0 images"):
        evaluate_codec(dvae(), RealImages(images(0, 0), images(0, 1)), [Brightness()], EvaluateConfig())
