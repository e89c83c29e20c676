"""Encoders of others as judges, from files; CMMD against closed forms."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F
from torchvision import models

from image_diffusion.configure import reference_stages
from image_diffusion.core.files import sha256_file
from image_diffusion.experiment import load_experiment
from image_diffusion.metrics.cmmd import cmmd, gaussian_kernel
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.encoders import Torchvision, Transformers
from image_diffusion.metrics.kernel import kernel_distance

ROOT = Path(__file__).parents[2]
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 48, 48), dtype=np.uint8))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("torchvision") / "resnet18.pth"
    torch.save(models.resnet18(weights=None).state_dict(), path)
    return path


def test_features_are_what_the_last_layer_of_the_classifier_is_given(weights: Path) -> None:
    detector = Torchvision(model="resnet18", weights=weights, resolution=64).build()
    seen = detector(IMAGES)
    assert seen.features.shape == (3, 512) and seen.features.dtype == torch.float32 and seen.logits is None
    network = models.resnet18(weights=None)
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.fc = torch.nn.Identity()
    x = F.interpolate(IMAGES.float() / 255, (64, 64), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
    x = (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    with torch.inference_mode():
        torch.testing.assert_close(seen.features, network.eval()(x))
    torch.testing.assert_close(detector(IMAGES[1:2]).features, seen.features[1:2])
    assert detector.identity == {
        "name": "resnet18", "resize": "bicubic, antialiased, 64", "sha256": sha256_file(weights)
    }  # fmt: skip
    assert detector(IMAGES[:, :1]).features.shape == (3, 512), "grey images, too"


def test_the_two_ways_to_resize_differ_and_are_told_apart_by_name(weights: Path) -> None:
    kinds = [Torchvision.model_validate({"model": "resnet18", "weights": weights, "resolution": 32, "resize": resize})
             for resize in ("antialiased", "legacy")]  # fmt: skip
    assert [each.metric_name("fd") for each in kinds] == ["fd_resnet18", "fd_resnet18_legacy"]
    one, other = (each.build() for each in kinds)
    assert one.identity["resize"] != other.identity["resize"]
    assert not torch.allclose(one(IMAGES).features, other(IMAGES).features)
    settings = EvaluateConfig.model_validate({"detectors": ["inpipe", *kinds]})
    assert len(settings.detectors) == 3, "both may judge in one evaluation"


def test_every_architecture_gives_features_a_row_an_image() -> None:
    for model, width in (("convnext_tiny", 768), ("vit_b_16", 768)):
        detector = Torchvision(model=model, resolution=224)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "get_model", lambda name, weights, get=models.get_model: get(name, weights=None))
            assert detector.build()(IMAGES[:1]).features.shape == (1, width)


def test_mistakes_are_one_line(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="torchvision has no classifier convnxt"):
        Torchvision(model="convnxt").build()
    with pytest.raises(ValueError, match="nowhere.pth, which does not exist"):
        Torchvision(weights=tmp_path / "nowhere.pth").build()
    with pytest.raises(ValueError, match="resnet34 could not be loaded: .* Set weights in evaluate.detectors"):
        Torchvision(model="resnet34", weights=weights).build()
    with pytest.raises(ValidationError, match="only openai/clip-vit-large-patch14-336 is called clip. Name others"):
        Transformers(weights="facebook/dinov3-vitb16-pretrain-lvd1689m")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match="The detector clip needs the package transformers. Run: python -m pip install"
    ):
        Transformers().build()


@pytest.mark.parametrize("kind", ["clip", "siglip", "dinov2"])
def test_a_vision_tower_from_a_folder(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "dinov2":
        model: Any = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    else:
        name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
        text = {key: value for key, value in sizes.items() if key not in ("image_size", "patch_size")}
        config = getattr(transformers, f"{name}Config")(text_config=text | {"vocab_size": 9}, vision_config=sizes)
        model = getattr(transformers, f"{name}Model")(config)
    model.save_pretrained(tmp_path)
    processor = "CLIPImageProcessor" if kind != "siglip" else "SiglipImageProcessor"
    getattr(transformers, processor)(image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(tmp_path)
    detector = Transformers(weights=str(tmp_path), name=f"tiny_{kind}").build()
    seen = detector(IMAGES).features
    x = F.interpolate(IMAGES.float() / 255, (32, 32), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
    with torch.inference_mode():
        x = (x - 0.5) / 0.25
        if kind == "dinov2":
            expected = model.eval()(pixel_values=x).pooler_output
        else:
            expected = model.eval().get_image_features(pixel_values=x)
            expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(seen, expected)
    assert detector.metric_name("cmmd") == f"cmmd_tiny_{kind}" and len(detector.identity["sha256"]) == 64


def test_each_has_a_folder_of_what_it_saw() -> None:
    experiment = load_experiment(ROOT / "config/experiments/demo_flow.yaml")
    settings = EvaluateConfig.model_validate({"detectors": ["torchvision", "transformers", {"type": "torchvision",
                                              "model": "resnet50"}]})  # fmt: skip
    usual, clip, other = reference_stages(experiment.model_copy(update={"evaluate": settings}))
    assert (usual, clip) == ("torchvision", "transformers") and other.startswith("torchvision-")


def test_the_mmd_of_two_gaussians_has_a_closed_form() -> None:
    """E k of N(a, s²) and N(b, s²) in D dimensions: (w² / (w² + 2 s²))^(D / 2) exp(-|a - b|² / (2 (w² + 2 s²)))."""
    rng, w, s, shift, D = np.random.default_rng(0), 1.5, 1.0, 0.7, 3

    def expected(distance: float) -> float:
        total = w**2 + 2 * s**2
        return float((w**2 / total) ** (D / 2) * math.exp(-(distance**2) * D / (2 * total)))

    x, y = (torch.from_numpy(rng.normal(mean, s, (4000, D))) for mean in (0.0, shift))
    found = kernel_distance(x, y, lambda a, b: gaussian_kernel(a, b, w))
    assert found.value == pytest.approx(2 * expected(0) - 2 * expected(shift), rel=0.05)
    assert found.interval is not None and found.interval[0] < found.value < found.interval[1]


def test_cmmd_of_two_points_and_by_its_definition() -> None:
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.5]])
    apart = cmmd(a.expand(5, -1), b.expand(7, -1)).value  # of norm 1, at a squared distance of 2
    assert apart == pytest.approx(1000 * (2 - 2 * math.exp(-2 / 200)), rel=1e-9)
    rng = np.random.default_rng(1)
    x, y = (rng.normal(mean, 1, (count, 8)) for mean, count in ((0.0, 40), (0.3, 30)))
    found = cmmd(torch.from_numpy(x), torch.from_numpy(y)).value
    x, y = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (x, y))

    def kernel(p: Any, q: Any) -> Any:
        return np.exp(-((p[:, None] - q[None]) ** 2).sum(2) / 200)

    within = [(kernel(each, each).sum() - len(each)) / (len(each) * (len(each) - 1)) for each in (x, y)]
    assert found == pytest.approx(1000 * (sum(within) - 2 * kernel(x, y).mean()), rel=1e-6)


def test_its_interval_covers_the_truth() -> None:
    """Against one reference set: what many samples score beside it is what the interval is of."""
    rng = np.random.default_rng(2)
    reference = torch.from_numpy(rng.normal(0.3, 1, (300, 6)))
    truth = cmmd(torch.from_numpy(rng.normal(0, 1, (20_000, 6))), reference).value
    hits = []
    for _ in range(200):
        interval = cmmd(torch.from_numpy(rng.normal(0, 1, (200, 6))), reference).interval
        assert interval is not None
        hits.append(interval[0] <= truth <= interval[1])
    assert 0.90 <= np.mean(hits) <= 0.98
