"""From samples and a data set to metrics.json: the metrics, their floor, the plots, and one-line errors."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.files.checksums import write_listing
from image_diffusion.metrics import compute
from image_diffusion.metrics import curves as curve
from image_diffusion.metrics.compute import Reference
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.curves import measure_previews, read_previews
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.distances.moments import Moments
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features import base as features
from image_diffusion.metrics.features.base import Detected, detect, detect_each
from image_diffusion.metrics.features.pretrained import Dinov2, Inception
from image_diffusion.metrics.features.reference_features import read_statistics, write_statistics
from image_diffusion.metrics.images import memorization
from image_diffusion.metrics.images.memorization import find_copies, find_feature_copies, plot_copies, reduced
from image_diffusion.metrics.samples import Samples, read_samples
from image_diffusion.stages.evaluate import check_samples_of

CLASSES = ["dark", "grey", "bright"]


class Brightness:
    """A detector for tests: mean brightness of the quarters of an image, and which class that is."""

    classes = CLASSES
    identity: dict[str, Any] = {"name": "test", "sha256": "abc"}  # noqa: RUF012
    doubt: str | None = None

    def __call__(self, images: Tensor) -> Detected:
        quarters = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
        level = quarters.mean(dim=1, keepdim=True)
        return Detected(quarters, -(level - torch.tensor([0.2, 0.5, 0.8])).abs() * 20)

    def metric_name(self, metric: str) -> str:
        return f"inpipe_{metric}"


def images(count: int, seed: int, classes: list[str] = CLASSES, shift: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    level = 51 + 76 * labels + shift
    pixels = np.clip(level[:, None, None, None] + rng.normal(0, 30, (count, 16, 16, 3)), 0, 255).astype(np.uint8)
    return Samples(pixels, labels, classes, digest=f"set {seed}")


@pytest.fixture(scope="module")
def data() -> RealImages:
    return RealImages(images(600, 0), images(150, 1))


def test_panel_of_good_samples_is_near_the_floor(data: RealImages, tmp_path: Path):
    result = evaluate_samples(images(300, 2), data, [Brightness()], EvaluateConfig(), tmp_path)
    metrics = result["metrics"]
    assert set(metrics) == {
        *(f"inpipe_{name}" for name in ("fd", "kd", "mind", "precision", "recall", "density", "coverage")),
        *(f"inpipe_{name}" for name in ("c2st", "agreement", "missing_classes", "class_fd")),
        *("copies", "inpipe_copies"),
    }
    assert (
        metrics["inpipe_fd"]["interval"][0] <= metrics["inpipe_fd"]["debiased"] <= metrics["inpipe_fd"]["interval"][1]
    )
    assert metrics["inpipe_fd"]["floor_n"] == 150 and metrics["inpipe_fd"]["ratio"] < 5
    assert metrics["inpipe_agreement"]["value"] > 0.99 and metrics["inpipe_missing_classes"]["value"] == 0
    assert metrics["copies"]["value"] < 0.1
    assert result["classes"]["grey"]["asked"] == 100
    assert result["protocol"]["reference"] == {"split": "train", "data": "set 0", "num_images": 600}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "classes.png",
        "confusion.png",
        "nearest-inpipe_copies.png",
        "nearest.png",
    ]
    write_json(tmp_path / "a.json", result)
    write_json(tmp_path / "b.json", evaluate_samples(images(300, 2), data, [Brightness()], EvaluateConfig()))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_panel_detects_shifted_and_mislabelled_samples(data: RealImages):
    good, bad = images(300, 3), images(300, 3, shift=60)
    bad.labels = (bad.labels + 1) % 3
    first, second = (
        evaluate_samples(each, data, [Brightness()], EvaluateConfig(copies=False))["metrics"] for each in (good, bad)
    )
    assert second["inpipe_fd"]["interval"][0] > first["inpipe_fd"]["interval"][1]
    assert second["inpipe_class_fd"]["value"] > 10 * first["inpipe_class_fd"]["value"]
    assert second["inpipe_agreement"]["value"] < 0.7 and second["inpipe_c2st"]["value"] > 0.6


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_panel_metrics_do_not_depend_on_the_batch_size(data: RealImages, at_once: int, monkeypatch: pytest.MonkeyPatch):
    settings = EvaluateConfig(copies=False)
    expected = evaluate_samples(images(120, 4), data, [Brightness()], settings)["metrics"]
    monkeypatch.setattr(features, "AT_ONCE", at_once)
    found = evaluate_samples(images(120, 4), data, [Brightness()], settings)["metrics"]
    for name, entry in expected.items():
        assert found[name]["value"] == pytest.approx(entry["value"], rel=1e-6)


@pytest.mark.parametrize("classes", [CLASSES, []])
def test_samples_without_classes_get_no_class_metrics_and_picture(data: RealImages, tmp_path: Path, classes: list[str]):
    samples = images(120, 5, classes)
    samples.has_labels = not classes  # without classes, labels exist but have no names
    judge = Brightness()
    judge.classes = classes
    (tmp_path / "classes.png").write_bytes(b"of before")
    result = evaluate_samples(samples, data, [judge], EvaluateConfig(copies=False), report=tmp_path)
    assert "inpipe_agreement" not in result["metrics"] and result["classes"] == {}
    assert not (tmp_path / "classes.png").exists()


def test_reference_may_be_statistics_or_other_samples(data: RealImages, tmp_path: Path):
    made, other = images(200, 6), images(200, 7)
    np.savez(tmp_path / "other.npz", other.gather(np.arange(200)).permute(0, 2, 3, 1).numpy(), other.labels)
    settings = EvaluateConfig(copies=False)
    against_samples = evaluate_samples(made, data, [Brightness()], settings, reference_file=tmp_path / "other.npz")
    seen = Brightness()(other.gather(np.arange(200))).features
    write_statistics(tmp_path / "stats.npz", {"fd": Moments.from_features(seen).gaussian}, "abc")
    assert read_statistics(tmp_path / "stats.npz", "abc")["fd"].count == 200
    against_file = evaluate_samples(made, data, [Brightness()], settings, reference_file=tmp_path / "stats.npz")
    assert against_file["metrics"]["inpipe_fd"]["value"] == pytest.approx(
        against_samples["metrics"]["inpipe_fd"]["value"], rel=1e-9
    )
    assert "inpipe_recall" not in against_file["metrics"] and against_file["metrics"]["inpipe_fd"]["ratio"] is None


def test_adm_statistics_are_read_and_invalid_ones_rejected(data: RealImages, tmp_path: Path):
    eye = np.eye(4)
    np.savez(tmp_path / "adm.npz", mu=np.zeros(4), sigma=eye, mu_s=np.zeros(7), sigma_s=np.eye(7), arr_0=np.zeros(3))
    assert set(read_statistics(tmp_path / "adm.npz", "any")) == {"fd", "spatial_fd"}
    np.savez(tmp_path / "wide.npz", mu=np.zeros(5), sigma=np.eye(5))
    np.savez(tmp_path / "odd.npz", mu=np.zeros(5), sigma=eye)
    np.savez(tmp_path / "other.npz", mu=np.zeros(4), sigma=eye, detector="another")
    np.savez(tmp_path / "nan.npz", mu=np.full(4, np.nan), sigma=eye)
    for name, message in [
        ("wide.npz", "12 dimensions but the reference .* has 5"),
        ("odd.npz", r"mu \[5\] and sigma \[4, 4\] do not fit"),
        ("other.npz", "measured with detector another, not abc"),
        ("nan.npz", "not finite"),
        ("edm2.pkl", "is a pickle"),
        ("absent.npz", "does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate_samples(images(50, 8), data, [Brightness()], EvaluateConfig(), reference_file=tmp_path / name)


def test_samples_are_read_with_their_protocol(tmp_path: Path):
    np.savez(tmp_path / "samples.npz", np.zeros((3, 8, 8, 3), np.uint8), np.array([0, 1, 2]))
    write_json(tmp_path / "samples.json", {"sampler": "ddim"})
    samples = read_samples(tmp_path / "samples.npz", CLASSES)
    assert samples.protocol == {"sampler": "ddim"} and samples.has_labels and samples.shape == (3, 8, 8)
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    pictures = read_samples(tmp_path)
    assert pictures.gather(np.array([2]))[0, 0, 0, 0] == 2 and not pictures.has_labels


def test_invalid_samples_are_rejected(data: RealImages, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, arrays, message in [
        (tmp_path / "absent.npz", None, "does not exist"),
        (empty, None, "holds no pictures"),
        (tmp_path / "none.npz", {"arr_0": np.zeros((0, 8, 8, 3), np.uint8)}, "holds no samples"),
        (tmp_path / "float.npz", {"arr_0": np.zeros((2, 8, 8, 3))}, r"float64 \[2, 8, 8, 3\]; expected uint8"),
        (tmp_path / "named.npz", {"images": np.zeros(3)}, "holds images but no arr_0"),
        (
            tmp_path / "short.npz",
            {"arr_0": np.zeros((2, 8, 8, 3), np.uint8), "arr_1": np.zeros(3)},
            "2 samples but labels",
        ),
    ]:
        if arrays is not None:
            np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            read_samples(path)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "short.npz").read_bytes()[:200])
    with pytest.raises(ValueError, match="damaged or not an"):
        read_samples(tmp_path / "cut.npz")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    Image.new("RGB", (8, 8)).save(mixed / "a.png")
    Image.new("RGB", (9, 8)).save(mixed / "b.png")
    with pytest.raises(ValueError, match=r"a\.png and b\.png are 8x8x3 and 9x8x3|a\.png and b\.png are"):
        read_samples(mixed)


def test_invalid_inputs_are_rejected_before_the_detector_runs(data: RealImages):
    class Never(Brightness):
        def __call__(self, images: Tensor) -> Detected:
            raise AssertionError("the detector ran")

    small = Samples(np.zeros((50, 8, 8, 3), np.uint8), None, [])
    unknown = images(50, 9)
    unknown.labels = unknown.labels + 1
    nothing = RealImages(images(600, 0), images(0, 1))
    for samples, real, settings, message in [
        (images(4, 9), data, EvaluateConfig(), "4 samples are too few"),
        (small, data, EvaluateConfig(), r"shape \[3, 8, 8\] but the reference images \[3, 16, 16\]"),
        (unknown, data, EvaluateConfig(), "label 3 but the data set has 3 classes"),
        (images(50, 9), nothing, EvaluateConfig(reference="validation"), "validation split has 0 images"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate_samples(samples, real, [Never()], settings)


def test_reference_of_another_size_is_rejected_before_the_detector_runs(data: RealImages, tmp_path: Path):
    class Never(Brightness):
        def __call__(self, images: Tensor) -> Detected:
            raise AssertionError("the detector ran")

    np.savez(tmp_path / "small.npz", np.zeros((50, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match=r"shape \[3, 16, 16\] but those in .*small.npz \[3, 8, 8\]"):
        evaluate_samples(images(50, 9), data, [Never()], EvaluateConfig(), reference_file=tmp_path / "small.npz")


def test_non_finite_features_are_rejected(data: RealImages):
    class Broken(Brightness):
        def __call__(self, images: Tensor) -> Detected:
            seen = super().__call__(images)
            return Detected(seen.features * float("nan"), seen.logits)

    with pytest.raises(ValueError, match="not finite"):
        evaluate_samples(images(50, 9), data, [Broken()], EvaluateConfig())


def test_every_detector_reports_the_share_of_copies(data: RealImages, tmp_path: Path):
    """Three in ten samples are training images."""
    made = images(300, 77)
    pixels = made.gather(np.arange(300)).permute(0, 2, 3, 1).numpy()
    pixels[:90] = data.train.gather(np.arange(90)).permute(0, 2, 3, 1).numpy()
    found = evaluate_samples(
        Samples(pixels, made.labels, CLASSES, digest="copied"), data, [Brightness()], EvaluateConfig(), tmp_path
    )["metrics"]
    for name in ("copies", "inpipe_copies"):
        low, high = found[name]["interval"]
        assert low <= found[name]["value"] <= high and low > 0.2 and found[name]["floor"] == 0.01
    few = RealImages(data.train, images(99, 1))
    entries = evaluate_samples(made, few, [Brightness()], EvaluateConfig())["metrics"]
    assert entries["copies"]["value"] is not None and "training images, each against" in entries["copies"]["note"]
    unknown = entries["inpipe_copies"]
    assert unknown["value"] is None and unknown["note"] == "no threshold: it takes 100 held-out images"
    fewer = RealImages(images(99, 2), images(20, 1))
    unknown = evaluate_samples(made, fewer, [Brightness()], EvaluateConfig())["metrics"]["copies"]
    assert unknown["value"] is None and unknown["note"] == "no threshold: it takes 100 held-out or training images"


def test_feature_copies_are_the_nearest_training_images(monkeypatch: pytest.MonkeyPatch):
    rng = torch.Generator().manual_seed(0)
    made, train, held_out = (torch.randn(n, 5, generator=rng) for n in (20, 90, 120))
    monkeypatch.setattr(memorization, "_AT_ONCE", 37)
    found = find_feature_copies(made, train, held_out)
    pairs = torch.cdist(made.double(), train.double())
    torch.testing.assert_close(found.distance, pairs.amin(dim=1))
    assert torch.equal(found.nearest, pairs.argsort(dim=1)[:, :4])
    assert found.threshold == pytest.approx(
        float(torch.cdist(held_out.double(), train.double()).amin(dim=1).quantile(0.01))
    )


@pytest.mark.parametrize(("share", "count"), [(0.01, 300), (0.03, 300), (0.01, 2000), (0.3, 200)])
def test_interval_of_a_share_covers_the_true_share(share: float, count: int):
    draw = np.random.default_rng(0)
    hits = []
    for _ in range(1000):
        interval = share_estimate(torch.from_numpy(draw.random(count) < share)).interval
        assert interval is not None
        hits.append(interval[0] <= share <= interval[1])
    assert 0.90 <= np.mean(hits) <= 0.98


def small(samples: Samples) -> torch.Tensor:
    return detect_each([reduced], samples)[0].features


def test_mirrored_and_plain_copies_are_found_and_new_images_are_not(tmp_path: Path):
    rng = np.random.default_rng(0)
    train, held_out, fresh = (
        Samples(rng.integers(0, 256, (n, 16, 16, 3), np.uint8), None, []) for n in (300, 200, 100)
    )
    copied = train.gather(np.arange(100)).permute(0, 2, 3, 1).numpy().astype(np.int64)
    copied = np.clip(copied + rng.integers(-10, 11, copied.shape), 0, 255).astype(np.uint8)
    copied[::2] = copied[::2, :, ::-1]
    found = find_copies(small(Samples(copied, None, [])), train, held_out)
    plot_copies(Samples(copied, None, []), train, found, tmp_path / "one.png", rows=1)
    plot_copies(Samples(copied, None, []), train, found, tmp_path / "two.png", rows=2)
    widths, heights = zip(*(Image.open(tmp_path / f"{name}.png").size for name in ("one", "two")), strict=True)
    assert widths[0] == widths[1] and heights[0] < heights[1]
    assert bool(found.flagged.all()) and found.nearest[:, 0].tolist() == list(range(100))
    assert float(find_copies(small(fresh), train, held_out).flagged.float().mean()) < 0.06


def test_copies_are_found_with_few_held_out_images():
    rng = np.random.default_rng(0)
    train, fresh = (rng.integers(0, 256, (n, 16, 16, 3), np.uint8) for n in (300, 200))
    train[:40, :, ::-1] = train[40:80]
    train[200:] = train[:100]
    copied = Samples(np.clip(train[:100].astype(np.int64) + 3, 0, 255).astype(np.uint8), None, [])
    kept, few = Samples(train, None, []), Samples(fresh[:99], None, [])
    found = find_copies(small(copied), kept, few)
    assert bool(found.flagged.all()) and found.num_real == 100
    assert find_copies(small(copied), kept, None).threshold == found.threshold
    assert float(find_copies(small(Samples(fresh[99:], None, [])), kept, few).flagged.float().mean()) < 0.06
    assert find_copies(small(copied), Samples(train[:99], None, []), few).threshold is None
    assert find_copies(small(copied), Samples(train[:1], None, []), None).nearest.shape == (100, 1)


def test_held_out_images_also_in_training_do_not_set_the_threshold():
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(0, 256, (n, 16, 16, 3), np.uint8) for n in (300, 200))
    held_out[:10] = train[:10]
    found = find_copies(small(Samples(train[:100], None, [])), Samples(train, None, []), Samples(held_out, None, []))
    assert bool(found.flagged.all()) and found.num_real == 190
    seen = find_feature_copies(*(torch.from_numpy(part).flatten(1).float() for part in (train[:100], train, held_out)))
    assert bool(seen.flagged.all()) and seen.num_real == 190


def test_neighbours_do_not_depend_on_the_batch_size(data: RealImages, monkeypatch: pytest.MonkeyPatch):
    expected = find_copies(small(images(40, 5)), data.train, data.validation)
    monkeypatch.setattr(memorization, "_AT_ONCE", 37)
    found = find_copies(small(images(40, 5)), data.train, data.validation)
    torch.testing.assert_close(found.distance, expected.distance)
    assert torch.equal(found.nearest, expected.nearest) and found.threshold == pytest.approx(expected.threshold)
    assert find_copies(small(images(4, 5)), images(3, 6), None).nearest.shape == (4, 3)


def test_missing_weights_are_reported_without_network_access(tmp_path: Path):
    with pytest.raises(ValueError, match="needs --detector"):
        EvaluateConfig().detectors[0].build(None)
    with pytest.raises(ValueError, match=r"weights of dinov2_vitl14 is .*absent\.pth, which does not exist"):
        Dinov2(weights=tmp_path / "absent.pth").build()
    pytest.importorskip("torch_fidelity")
    with pytest.raises(ValueError, match=r"Inception weights .*absent\.pth do not exist"):
        Inception(weights=tmp_path / "absent.pth").build()
    (tmp_path / "damaged.pth").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a file of plain tensors"):
        Inception(weights=tmp_path / "damaged.pth").build()


def test_failed_download_names_the_required_file(monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")

    def offline(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(module, "load_state_dict_from_url", offline)
    monkeypatch.setattr(torch.hub, "load", offline)
    with pytest.raises(ValueError, match=r"could not be downloaded \(no network\)\. Get the file"):
        Inception().build()
    with pytest.raises(ValueError, match="DINOv2 could not be loaded"):
        Dinov2().build()


def test_dinov2_preparation_is_imagenet_normalization(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.hub, "load", lambda *where, **options: torch.nn.Identity())
    prepare = Dinov2().build()._prepared
    white = prepare(torch.full((1, 1, 32, 32), 255, dtype=torch.uint8))
    assert white.shape == (1, 3, 224, 224)
    assert white[0, :, 0, 0].tolist() == pytest.approx([2.2489, 2.4286, 2.64], abs=1e-3)
    black = prepare(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))[0, :, 0, 0]
    assert black.tolist() == pytest.approx([-2.1179, -2.0357, -1.8044], abs=1e-3)
    stripes = prepare(torch.tensor([0, 255], dtype=torch.uint8).repeat(1, 3, 32, 16))  # bicubic weights overshoot
    torch.testing.assert_close(stripes.amin((0, 2, 3)), black)
    torch.testing.assert_close(stripes.amax((0, 2, 3)), white[0, :, 0, 0])
    grey = prepare(torch.full((2, 1, 300, 300), 128, dtype=torch.uint8))
    assert grey.shape == (2, 3, 224, 224) and grey[1, 0, 0, 0].item() == pytest.approx((128 / 255 - 0.485) / 0.229)
    noise = np.random.default_rng(0).integers(80, 170, (40, 40, 3), np.uint8)  # away from clipped values
    by_pillow = np.asarray(Image.fromarray(noise).resize((224, 224), Image.Resampling.BICUBIC)) / 255
    ours = prepare(torch.from_numpy(noise).permute(2, 0, 1)[None])[0, 0] * 0.229 + 0.485
    assert np.abs(ours.numpy() - by_pillow[..., 0]).max() < 2 / 255, "it rounds twice"
    fine = prepare(torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8).repeat(1, 3, 448, 448))
    assert fine[0, 0].std() < 0.1, "a pattern finer than the result's pixels is grey"
    assert [Dinov2(model=name).suffix for name in ("dinov2_vitl14", "dinov2_vits14")] == ["dinov2", "dinov2_vits14"]


@pytest.mark.parametrize("brings", [False, True])
def test_dinov2_loads_published_or_local_weights(brings: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    network.register_buffer("factor", torch.zeros(1))

    def load(where: str, model: str, **given: Any) -> torch.nn.Module:
        asked.update(where=where, model=model, **given)
        return network

    monkeypatch.setattr(torch.hub, "load", load)
    usual = {"model": "dinov2_vitl14", "trust_repo": True, "verbose": False}
    if brings:
        torch.save({"factor": torch.ones(1)}, tmp_path / "weights.pth")
        detector = Dinov2(weights=tmp_path / "weights.pth", repository=tmp_path).build()
        assert asked == {"where": str(tmp_path), "source": "local", "pretrained": False, **usual}
        assert network.factor == 1 and len(detector.identity["sha256"]) == 64
        torch.save({"_orig_mod.factor": 2 * torch.ones(1)}, tmp_path / "compiled.pth")
        Dinov2(weights=tmp_path / "compiled.pth", repository=tmp_path).build()
        assert network.factor == 2
        torch.save({"factor": Path()}, tmp_path / "pickle.pth")
        with pytest.raises(UnpicklingError, match="Weights only load failed"):
            Dinov2(weights=tmp_path / "pickle.pth", repository=tmp_path).build()
    else:
        detector = Dinov2().build()
        assert asked == {"where": "facebookresearch/dinov2", "source": "github", "pretrained": True, **usual}
        assert network.factor == 0 and detector.identity["sha256"] == "torch.hub's own release"
    assert detector(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).features.shape == (2, 3)


def test_previews_with_too_few_samples_are_not_in_the_curve(data: RealImages):
    """Each sample needs a neighbour beyond its nearest ones: neighbours + 2 samples, including itself."""
    settings = EvaluateConfig(neighbours=3, two_sample=False)
    reference = Reference.from_images(detect(Brightness(), data.train), torch.from_numpy(data.train.labels))
    previews = {step: images(count, step) for step, count in ((10, 3), (20, 4), (30, 5), (40, 6))}
    curve = measure_previews(previews, Brightness(), lambda _: reference, CLASSES, settings)
    assert [(point["step"], point["num_samples"]) for point in curve] == [(30, 5), (40, 6)]


def test_previews_compute_only_curve_metrics(data: RealImages, monkeypatch: pytest.MonkeyPatch):
    for name in (
        *("monge_distance", "cmmd", "manifold_estimates", "two_sample_test"),
        "missing_classes",
        "class_frechet",
    ):
        monkeypatch.setattr(compute, name, lambda *_, name=name: pytest.fail(f"{name} is computed"))
    reference = Reference.from_images(detect(Brightness(), data.train), torch.from_numpy(data.train.labels))
    previews = {10: images(40, 10)}
    points = measure_previews(previews, Brightness(), lambda _: reference, CLASSES, EvaluateConfig(cmmd=True))
    assert list(points[0]) == ["step", "num_samples", "inpipe_kd", "inpipe_fd", "inpipe_agreement"]


def test_curve_axes_include_negative_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[Any] = []
    monkeypatch.setattr(curve, "save_figure", lambda figure, path: drawn.append(figure))
    points = [{"step": 1, "num_samples": 9, "fd": 2.0, "kd": 0.1}, {"step": 2, "num_samples": 9, "fd": 1.0, "kd": -0.2}]
    curve.plot_curve(points, tmp_path / "curve.png")
    fd, kd = drawn[0].axes
    assert fd.get_ylim()[0] == 0 and kd.get_ylim()[0] < -0.2


def test_preview_curve_has_the_metrics_of_the_samples(data: RealImages, tmp_path: Path):
    settings = EvaluateConfig(copies=False)
    for step, shift in ((200, 60), (400, 0)):
        made = images(60, step, shift=shift)
        pixels = made.gather(np.arange(60)).permute(0, 2, 3, 1).numpy()
        np.savez(tmp_path / f"step-{step:07d}.npz", pixels, made.labels)
    previews, left_out = read_previews(tmp_path, CLASSES, 400)
    assert not left_out
    result = evaluate_samples(images(60, 400), data, [Brightness()], settings, tmp_path / "report", previews=previews)
    worse, better = result["curve"]
    assert (worse["step"], better["step"]) == (200, 400) and better["num_samples"] == 60
    for name in ("inpipe_kd", "inpipe_fd", "inpipe_agreement"):
        assert better[name] == pytest.approx(result["metrics"][name]["value"], rel=1e-9)
    assert worse["inpipe_kd"] > better["inpipe_kd"] and worse["inpipe_fd"] > better["inpipe_fd"]
    assert Image.open(tmp_path / "report" / "curve.png").width > 100
    assert read_previews(tmp_path / "nowhere", CLASSES, 400) == ({}, [])


def test_damaged_and_missing_previews_are_reported_and_skipped(tmp_path: Path):
    for step in (10, 20, 30, 40):
        pixels = images(6, step).gather(np.arange(6)).permute(0, 2, 3, 1).numpy()
        np.savez(tmp_path / f"step-{step:07d}.npz", pixels)
    damaged = tmp_path / "step-0000010.npz"
    damaged.write_bytes(damaged.read_bytes()[:100])  # before its sha256 was recorded
    write_listing(tmp_path, "step-*.npz")
    np.savez(tmp_path / "step-0000020.npz", pixels)
    (tmp_path / "step-0000030.npz").unlink()
    previews, left_out = read_previews(tmp_path, CLASSES, 40)
    assert list(previews) == [40]
    for sentence, (step, fault) in zip(
        left_out,
        {10: "is damaged or not an", 20: "is not what was drawn", 30: "is missing"}.items(),
        strict=True,
    ):
        assert sentence.startswith(
            f"The preview of step {step} is left out of the curve: {tmp_path}/step-00000{step}.npz"
        )
        assert fault in sentence
    (tmp_path / "listing.json").write_text("{")
    assert list(read_previews(tmp_path, CLASSES, 40)[0]) == [20, 40]
    assert "listing.json is damaged" in read_previews(tmp_path, CLASSES, 40)[1][0]


def test_samples_of_other_weights_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    check_samples_of("one", path)  # of another program, without a description
    write_json(tmp_path / "samples.json", {"weights_sha256": "one"})
    check_samples_of("one", path)
    with pytest.raises(ValueError, match=r"samples.json is of samples from other weights than --weights. Run sample"):
        check_samples_of("another", path)
