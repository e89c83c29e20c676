"""Super-resolution from end to end: small images in training, from a samples.npz in sampling, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import image_diffusion.configure
import image_diffusion.crop
import image_diffusion.sample
import image_diffusion.train
from image_diffusion.codecs.codec import from_uint8
from image_diffusion.core.types import DataSpec
from image_diffusion.systems.enlarging import shrink, small_images

SPEC = DataSpec(channels=3, resolution=16, num_classes=3)


def save(path: Path, images: np.ndarray, labels: np.ndarray | None = None) -> str:
    np.savez(path, images) if labels is None else np.savez(path, images, labels)
    return str(path)


def pixels(count: int = 5, side: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def test_a_small_pixel_is_the_mean_of_its_area():
    x = torch.arange(64.0).view(1, 1, 8, 8)
    assert torch.equal(shrink(x, 2), x.view(1, 1, 2, 4, 2, 4).mean((3, 5)))


def test_a_seed_has_its_small_image_and_its_label(tmp_path):
    path = save(tmp_path / "samples.npz", pixels(), np.array([0, 1, 2, 0, 1]))
    small, labels = small_images(path, 4, SPEC, torch.tensor([6, 2]))
    assert small is not None and torch.equal(small, from_uint8(torch.from_numpy(pixels()[[1, 2]])).permute(0, 3, 1, 2))
    assert labels is not None and labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (pixels(side=8), None, r"images of \(5, 8, 8, 3\), but the network enlarges uint8 images of \(N, 4, 4, 3\)"),
        (pixels().astype(np.float32), None, "holds torch.float32 images"),
        (pixels(count=0), None, r"images of \(0, 4, 4, 3\)"),
        (pixels(), np.array([0, 1, 2, 3, 0]), "labels up to 3, but the network knows 3 classes"),
    ],
)
def test_small_images_that_do_not_fit_are_told(tmp_path, images, labels, message):
    with pytest.raises(ValueError, match=message):
        small_images(save(tmp_path / "samples.npz", images, labels), 4, SPEC, torch.arange(2))


def test_small_images_nobody_enlarges_are_told(tmp_path):
    assert small_images(None, None, SPEC, torch.arange(2)) == (None, None)
    with pytest.raises(ValueError, match=r"base\.npz, but the network makes images from noise alone\. Leave it out"):
        small_images("base.npz", None, SPEC, torch.arange(2))


def test_small_images_that_are_missing_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"enlarges images of 4 x 4, but sample\.small_images names none"):
        small_images(None, 4, SPEC, torch.arange(2))
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    for name in ("absent.npz", "bad.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not a samples\.npz"):
            small_images(str(tmp_path / name), 4, SPEC, torch.arange(2))


def test_an_upsampler_of_latents_is_refused(tmp_path):
    path = tmp_path / "upsampler.yaml"
    sections = {
        "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 256},
        "codec": {"type": "stability_vae"},
        "system": {"type": "iddpm", "network": {"low_resolution": 16}},
        "train": {"steps": 1},
    }
    path.write_text(yaml.safe_dump(sections))
    with pytest.raises(ValueError, match=r"enlarges images works on pixels\. Leave out codec"):
        image_diffusion.configure.load_all([path])


def command(main, monkeypatch, *arguments: str | Path) -> None:
    """Run a verb in this process."""
    monkeypatch.setattr(sys, "argv", ["verb", *map(str, arguments)])
    main()


def test_an_upsampler_is_trained_and_enlarges_what_it_is_given(tmp_path, monkeypatch):
    small = save(tmp_path / "base.npz", pixels(), np.array([0, 1, 2, 9, 4]))
    experiment = tmp_path / "upsampler.yaml"
    sections = {
        "data": {
            "name": "digits", "source": {"type": "digits"}, "resolution": 16, "validation_fraction": 0.2,
            "num_shards": 1,
        },
        "system": {
            "type": "iddpm",
            "network": {
                "channels": 32, "multipliers": [1, 1], "num_res_blocks": 1, "attention_resolutions": [8],
                "low_resolution": 4,
            },
            "process": {"type": "discrete", "num_timesteps": 20},
        },
        "train": {
            "steps": 2, "global_batch": 4, "validate_every_steps": 2, "validation_samples": 4, "grid_every_steps": 2,
        },
        "preview": {"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 2}},
        "sample": {"num_samples": 4, "sampler": {"type": "ddim", "num_steps": 2}, "small_images": small},
    }  # fmt: skip
    experiment.write_text(yaml.safe_dump(sections))
    results = tmp_path / "results"
    command(image_diffusion.configure.main, monkeypatch, "--experiments", experiment, "--results", results)
    plan = json.loads((results / "upsampler" / "config" / "plan.json").read_text())["configs"]
    manifest = results / "datasets" / "digits-16" / "crops" / "manifest.json"
    weights = results / "upsampler" / "train" / "weights.safetensors"
    samples = results / "upsampler" / "samples" / "samples.npz"
    crop = ("--config", plan["crop"], "--output", manifest, "--processes", "1")
    command(image_diffusion.crop.main, monkeypatch, *crop)
    train = ("--config", plan["train"], "--data", manifest, "--output", weights)
    command(image_diffusion.train.main, monkeypatch, *train)
    assert list((results / "upsampler" / "train" / "previews").glob("*.png"))
    sample = ("--config", plan["sample"], "--weights", weights, "--output", samples)
    command(image_diffusion.sample.main, monkeypatch, *sample)
    with np.load(samples) as arrays:
        assert arrays["arr_0"].shape == (4, 16, 16, 3)
        assert arrays["arr_1"].tolist() == [0, 1, 2, 9]
