"""External encoders as detectors, from files; CMMD against closed forms."""

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

from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.experiments.resolve import reference_stages
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.set_distances import cmmd, gaussian_kernel, kernel_distance
from image_diffusion.metrics.features.pretrained import Torchvision, Transformers
from tiny_towers import PATCH, SIDE, write_tower

ROOT = Path(__file__).parents[2]
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 48, 48), dtype=np.uint8))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torchvision import models

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("torchvision") / "resnet18.pth"
    torch.save(models.resnet18(weights=None).state_dict(), path)
    return path


def test_features_are_the_input_of_the_last_classifier_layer(weights: Path) -> None:
    from torchvision import models

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


def test_weights_with_wrapper_prefixes_are_loaded(weights: Path, tmp_path: Path) -> None:
    tensors = torch.load(weights, weights_only=True)
    torch.save({f"module._orig_mod.{name}": each for name, each in tensors.items()}, tmp_path / "wrapped.pth")
    plain, wrapped = (Torchvision(model="resnet18", weights=path, resolution=64).build()(IMAGES).features
                      for path in (weights, tmp_path / "wrapped.pth"))  # fmt: skip
    assert torch.equal(plain, wrapped)


def test_resize_methods_differ_and_have_their_own_metric_names(weights: Path) -> None:
    kinds = [Torchvision.model_validate({"model": "resnet18", "weights": weights, "resolution": 32, "resize": resize})
             for resize in ("antialiased", "legacy")]  # fmt: skip
    assert [each.metric_name("fd") for each in kinds] == ["fd_resnet18", "fd_resnet18_legacy"]
    one, other = (each.build() for each in kinds)
    assert one.identity["resize"] != other.identity["resize"]
    assert not torch.allclose(one(IMAGES).features, other(IMAGES).features)
    settings = EvaluateConfig.model_validate({"detectors": ["inpipe", *kinds]})
    assert len(settings.detectors) == 3, "both may judge in one evaluation"


def test_every_architecture_returns_one_feature_row_per_image() -> None:
    from torchvision import models

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
    with pytest.raises(ValueError, match="The detector clip needs the package transformers. Install it: pip install"):
        Transformers().build()


def prepared(side: int) -> torch.Tensor:
    x = F.interpolate(IMAGES.float() / 255, (side,) * 2, mode="bicubic", antialias=True, align_corners=False)
    return (x.clamp(0, 1) - 0.5) / 0.25


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "Dinov2"])
def test_vision_tower_is_loaded_from_a_folder(kind: str, tmp_path: Path) -> None:
    model = write_tower(kind, tmp_path)
    detector = Transformers(weights=str(tmp_path), name=f"tiny_{kind.lower()}").build()
    seen, x = detector(IMAGES).features, prepared(SIDE)
    with torch.inference_mode():
        if kind == "Dinov2":
            expected = model(pixel_values=x).pooler_output
        else:
            expected = model.get_image_features(pixel_values=x)
            expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(seen, expected)
    assert detector.metric_name("cmmd") == f"cmmd_tiny_{kind.lower()}" and len(detector.identity["sha256"]) == 64


@pytest.mark.parametrize(
    ("kind", "others"),
    [("CLIP", 1), ("CLIPVision", 1), ("Siglip", 0), ("SiglipVision", 0), ("Dinov2", 1), ("Dinov2WithRegisters", 5),
     ("DINOv3ViT", 1), ("ViT", 1)],
)  # fmt: skip
def test_vision_tower_returns_patch_feature_maps(kind: str, others: int, tmp_path: Path) -> None:
    """At the processor's resolution and at another one, with interpolated positions."""
    model = write_tower(kind, tmp_path)
    tower = getattr(model, "vision_model", model)
    for side in (SIDE, 48):
        x = prepared(side)
        with torch.inference_mode():
            asked = {} if kind.startswith("D") else {"interpolate_pos_encoding": True}
            expected = tower(pixel_values=x, **asked).last_hidden_state[:, others:]
        resolution = None if side == SIDE else side
        encoder = Transformers(weights=str(tmp_path), name="tiny", resolution=resolution).build()
        maps = encoder.maps(IMAGES)
        assert maps.shape == (3, 16, side // PATCH, side // PATCH) and maps.dtype == torch.float32
        torch.testing.assert_close(maps.flatten(2).transpose(1, 2), expected)
        assert encoder(IMAGES).features.shape == (3, 16 if kind != "CLIP" else 512)


def test_processor_sets_the_resolution_and_is_part_of_the_identity(tmp_path: Path) -> None:
    for name, seed, side in (("one", 0, SIDE), ("same", 0, SIDE), ("other", 1, SIDE), ("large", 0, 64)):
        write_tower("Dinov2", tmp_path / name, seed, side)
    one, same, other, large = (
        Transformers(weights=str(tmp_path / name), name="tiny").build() for name in ("one", "same", "other", "large")
    )
    assert one.identity == same.identity and one.identity["sha256"] != other.identity["sha256"]
    assert one.maps(IMAGES).shape[2:] == (4, 4) and large.maps(IMAGES).shape[2:] == (8, 8)
    assert large.identity["resize"] == "bicubic, antialiased, 64"
    path = tmp_path / "same/preprocessor_config.json"
    path.write_text(path.read_text().replace("0.25", "0.2"))
    again = Transformers(weights=str(tmp_path / "same"), name="tiny").build()
    assert again.identity["sha256"] != one.identity["sha256"]


def test_model_whose_tokens_form_no_grid_is_a_one_line_error(tmp_path: Path) -> None:
    write_tower("ViTMAE", tmp_path)  # it masks three quarters of the patches
    with pytest.raises(ValueError, match=r"gives \[5, 16\] for an image, which is not one token for each of its patch"):
        Transformers(weights=str(tmp_path), name="tiny").build().maps(IMAGES)


def test_each_detector_has_its_own_reference_stage() -> None:
    experiment = load_experiment(ROOT / "config/experiments/demo_flow.yaml")
    settings = EvaluateConfig.model_validate({"detectors": ["torchvision", "transformers", {"type": "torchvision",
                                              "model": "resnet50"}]})  # fmt: skip
    usual, clip, other = reference_stages(experiment.model_copy(update={"evaluate": settings}))
    assert (usual, clip) == ("torchvision", "transformers") and other.startswith("torchvision-")


def test_mmd_of_two_gaussians_matches_the_closed_form() -> None:
    """E k of N(a, s²) and N(b, s²) in D dimensions: (w² / (w² + 2 s²))^(D / 2) exp(-|a - b|² / (2 (w² + 2 s²)))."""
    rng, w, s, shift, D = np.random.default_rng(0), 1.5, 1.0, 0.7, 3

    def expected(distance: float) -> float:
        total = w**2 + 2 * s**2
        return float((w**2 / total) ** (D / 2) * math.exp(-(distance**2) * D / (2 * total)))

    x, y = (torch.from_numpy(rng.normal(mean, s, (4000, D))) for mean in (0.0, shift))
    found = kernel_distance(x, y, lambda a, b: gaussian_kernel(a, b, w))
    assert found.value == pytest.approx(2 * expected(0) - 2 * expected(shift), rel=0.05)
    assert found.interval is not None and found.interval[0] < found.value < found.interval[1]


def test_cmmd_matches_its_definition() -> None:
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


def test_cmmd_interval_covers_the_true_value() -> None:
    """The true value is the score of many samples on both sides."""
    rng = np.random.default_rng(2)

    def draw(count: int, mean: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(mean, 1, (count, 6)))

    truth = cmmd(draw(8000, 0), draw(8000, 0.3)).value
    hits = []
    for _ in range(200):
        interval = cmmd(draw(200, 0), draw(300, 0.3)).interval
        assert interval is not None
        hits.append(interval[0] <= truth <= interval[1])
    assert 0.90 <= np.mean(hits) <= 0.98
