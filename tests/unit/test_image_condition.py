"""Image conditions, end to end: small images, grey images, holes and edges in training and sampling, metrics, and
rejected settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import image_diffusion.experiments.resolve
import image_diffusion.stages.crop
import image_diffusion.stages.sample
import image_diffusion.stages.train
import image_diffusion.tools.configure
from image_diffusion.codecs.base import from_uint8
from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.images.reconstruction import psnr
from image_diffusion.metrics.samples import Samples, read_samples
from image_diffusion.systems import AnySystem
from image_diffusion.systems.diffusion import evaluation
from image_diffusion.systems.diffusion.conditions.base import ConditionInputs, ImageSource
from image_diffusion.systems.diffusion.conditions.image import ImageCondition, read_images
from image_diffusion.systems.diffusion.evaluation import evaluate_paired
from image_diffusion.systems.diffusion.generator import SampleConfig, requested_labels

SPEC = DataSpec(channels=3, resolution=16, num_classes=3, conditions={"image": (3, 4, 4)})
STREAMS = Streams(0, torch.zeros(64, dtype=torch.int64), torch.arange(64))


def save(path: Path, images: np.ndarray, labels: np.ndarray | None = None) -> str:
    np.savez(path, images) if labels is None else np.savez(path, images, labels)
    return str(path)


def pixels(count: int = 5, side: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def seen(x: torch.Tensor, **degradation: Any) -> torch.Tensor:
    """The condition that a network receives for images, with its shape checked."""
    image = ImageCondition.model_validate({"from": "self", **degradation})
    (found,) = image.degraded(x, Streams(0, STREAMS.epoch[: len(x)], STREAMS.sample[: len(x)])).values()
    spec = DataSpec(channels=x.shape[1], resolution=(x.shape[2], x.shape[3]))
    assert image.spec(spec, None).conditions == {"image": tuple(found.shape[1:])}
    assert found.dtype == x.dtype and float(found.abs().max()) <= 1
    return found


def test_shrunk_pixels_are_area_means():
    x = torch.arange(64.0).view(1, 1, 8, 8) / 64
    assert torch.equal(seen(x, shrink=4), x.view(1, 1, 2, 4, 2, 4).mean((3, 5)))
    assert seen(torch.zeros(1, 3, 8, 16), shrink=4).shape == (1, 3, 2, 4)


def test_grey_images_have_the_luminance_of_the_colours():
    x = torch.rand(2, 3, 4, 4) * 2 - 1
    expected = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    torch.testing.assert_close(seen(x, gray=True), expected)
    torch.testing.assert_close(seen(torch.cat([x, x], 1), gray=True), x.mean(1, keepdim=True))


def test_holes_are_masked_boxes_with_sides_in_the_configured_range():
    x = torch.rand(64, 3, 16, 32) + 0.001
    x = x.clamp(max=1)
    found = seen(x, hole={"low": 0.25, "high": 0.5})
    hidden = found[:, 3:] == 1
    assert torch.equal(found[:, 3:], torch.where(hidden, 1.0, -1.0))
    assert torch.equal(found[:, :3], torch.where(hidden, 0.0, x))
    rows, columns = hidden[:, 0].any(2).sum(1), hidden[:, 0].any(1).sum(1)
    assert torch.equal(hidden.flatten(1).sum(1), rows * columns), "no box"
    assert set(rows.tolist()) == set(range(4, 9)) and int(columns.min()) >= 8 and int(columns.max()) <= 16
    assert torch.equal(seen(x, hole={"low": 0.25, "high": 0.5}), found), "drawn from the numbers of the samples alone"
    tops, lefts = hidden[:, 0].any(2).int().argmax(1), hidden[:, 0].any(1).int().argmax(1)
    assert tops.unique().numel() > 4 and lefts.unique().numel() > 8


def test_edge_strength_is_the_step_height():
    x = torch.full((1, 3, 8, 8), -1.0)
    x[..., 4:] = 1
    found = seen(x, edges=True)[0, 0]
    assert torch.equal(found, torch.tensor([-1.0, -1, -1, 1, 1, -1, -1, -1]).expand(8, 8))
    half = seen(x / 2, edges=True)[0, 0]
    assert torch.equal(half, torch.tensor([-1.0, -1, -1, 0, 0, -1, -1, -1]).expand(8, 8))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "nothing is set beside from: self. Set one of shrink, gray, hole, edges"),
        ({"shrink": 2, "gray": True}, "shrink and gray is set beside from: self. Set one of"),
        ({"hole": {"low": 0.5, "high": 0.25}}, "hole: low is 0.5, above high, 0.25. Exchange them"),
        ({"shrink": 1}, "shrink is 1: input should be greater than or equal to 2"),
        ({"from": "other"}, "Unknown condition.from 'other'. Known: self"),
        ({"shrink": 2, "frm": 1}, "frm is not a known key. Did you mean .*from"),
    ],
)
def test_empty_or_conflicting_image_conditions_are_rejected(written, message):
    with pytest.raises(ValueError, match=message):
        parse(AnySystem, {"type": "rin", "condition": {"type": "image", "from": "self", **written}}, "x.yaml: system")


def test_error_of_the_low_resolution_key_names_its_replacement():
    with pytest.raises(ValueError, match=r"network.low_resolution: small images of 8 x 8 .* \{type: image, from: self"):
        parse(AnySystem, {"type": "iddpm", "network": {"low_resolution": 8}}, "x.yaml: system")
    plain = parse(AnySystem, {"type": "iddpm", "network": {"low_resolution": None}}, "x.yaml: system")
    assert plain == parse(AnySystem, {"type": "iddpm"}, "x.yaml: system")


def test_seeds_select_small_images_and_labels(tmp_path):
    path = save(tmp_path / "samples.npz", pixels(), np.array([0, 1, 2, 0, 1]))
    small, labels = read_images(Path(path), SPEC, torch.tensor([6, 2]))
    assert torch.equal(small, from_uint8(torch.from_numpy(pixels()[[1, 2]])).permute(0, 3, 1, 2))
    assert labels is not None and labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (pixels(side=8), None, r"images of \(5, 8, 8, 3\), but the network takes uint8 images of \(N, 4, 4, 3\)"),
        (pixels().astype(np.float32), None, "holds torch.float32 images"),
        (pixels(count=0), None, r"images of \(0, 4, 4, 3\)"),
        (pixels(), np.array([0, 1, 2, 3, 0]), "labels up to 3, but the network has 3 classes"),
    ],
)
def test_invalid_small_images_are_rejected(tmp_path, images, labels, message):
    with pytest.raises(ValueError, match=message):
        read_images(Path(save(tmp_path / "samples.npz", images, labels)), SPEC, torch.arange(2))


def requested(small_images: Any, condition: Any = ({"type": "label"}, {"type": "image", "from": "self", "shrink": 4})):
    settings = SampleConfig(num_samples=2, small_images=small_images)
    parts = parse(AnySystem, {"type": "iddpm", "condition": list(condition)}, "x").conditioning
    return parts.sampling_request(ConditionInputs(settings, torch.arange(2), image_source=ImageSource(SPEC)))


def test_unused_small_images_are_rejected():
    assert requested(None, [{"type": "label"}]).conditions == {}
    with pytest.raises(ValueError, match=r"small_images is set, but the network takes no image\. Leave it out"):
        requested("base.npz", [{"type": "label"}])


def test_missing_small_images_are_reported(tmp_path):
    with pytest.raises(ValueError, match=r"needs the samples\.npz of base\. Name it: --small-images PATH"):
        requested(SamplesOf(experiment="base"))
    for source in (None, "validation"):
        with pytest.raises(ValueError, match=r"needs the folder of the crops\. Name it: --small-images PATH"):
            requested(source)
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    for name in ("absent.npz", "bad.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not a samples\.npz"):
            requested(str(tmp_path / name))


UPSAMPLER = {
    "data": {
        "name": "digits", "source": {"type": "digits"}, "resolution": 16, "validation_fraction": 0.2, "num_shards": 1,
    },
    "system": {
        "type": "iddpm",
        "network": {
            "channels": 32, "multipliers": [1, 1], "num_res_blocks": 1, "attention_resolutions": [8],
        },
        "condition": [{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}],
        "process": {"type": "discrete", "num_timesteps": 20},
    },
    "train": {
        "steps": 2, "global_batch": 4, "validate_every_steps": 2, "validation_samples": 4, "grid_every_steps": 2,
    },
    "preview": {"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 2}},
    "sample": {"num_samples": 4, "sampler": {"type": "ddim", "num_steps": 2}, "small_images": {"experiment": "base"}},
    "evaluate": {"neighbours": 1},
}  # fmt: skip
BASE = {
    **UPSAMPLER,
    "data": {**UPSAMPLER["data"], "resolution": 8},
    "system": {**UPSAMPLER["system"], "condition": {"type": "label"}},
    "sample": {"num_samples": 3, "sampler": {"type": "ddim", "num_steps": 2}},
}


def written(folder: Path, name: str, sections: dict[str, Any], **changes: Any) -> Path:
    """An experiment file. changes: sections to change, key by key."""
    path = folder / f"{name}.yaml"
    merged = {key: {**value, **changes.pop(key, {})} for key, value in sections.items()}
    path.write_text(yaml.safe_dump({**merged, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": {"type": "stability_vae"}}, r"is stability_vae: it is made of pixels\. Leave one of the two out"),
        ({"sample": {"small_images": None}, "data": {"validation_fraction": 0.0}},
         r"sample\.small_images is unset or validation, .* but data has no held-out images\. Set"),
        ({"system": {"condition": {"type": "label"}}}, r"sample\.small_images is set, but the network takes no image"),
        ({"sample": {"small_images": {"experiment": "nowhere"}}},
         r"sample\.small_images\.experiment is nowhere, but .*nowhere\.yaml does not exist"),
        ({"sample": {"small_images": "validation"}, "data": {"validation_fraction": 0.0}},
         r"data has no held-out images\. Set data\.validation_fraction"),
        ({"preview": {"small_images": "validation"}},
         r"preview\.small_images is set, but a system of type iddpm has no use for it"),
        ({"data": {"resolution": 32}, "system": {"network": {"channels": 32, "attention_resolutions": [8]},
                                                 "condition": {"type": "image", "from": "self", "shrink": 2}}},
         r"makes images of 3 x 8 x 8 \(channels x height x width\), but the network takes 3 x 16 x 16\. Name one"),
        ({"system": {"condition": {"type": "image", "from": "self", "shrink": 3}}},
         r"shrink 3 does not divide the resolution of the images, 16 x 16\. Leave it out, or change it"),
        ({"system": {"condition": {"type": "image", "from": "self", "gray": True}}, "data": {"channels": 1}},
         r"gray is true, but the images have one channel\. Leave it out"),
        ({"sample": {"small_images": None, "tiles": {"rows": 2}}},
         r"sample\.tiles is set, but the network is conditioned on an image\. Leave it out"),
        ({"sample": {"small_images": None, "keep": False}},
         r"sample\.keep is false, .* but sample\.small_images: validation needs them again"),
        ({"sample": {"small_images": None}, "export": {"format": "diffusers"}},
         r"DDPMPipeline has no classes and no conditions on images"),
    ],
    ids=["latents", "none to make it of", "no upsampler", "missing", "none held out", "preview", "resolution",
         "divisor", "grey", "tiles", "not kept", "export"],
)  # fmt: skip
def test_invalid_upsampler_is_rejected_before_any_work(tmp_path, changes, message):
    written(tmp_path, "base", BASE)
    with pytest.raises(ValueError, match=message) as caught:
        image_diffusion.experiments.resolve.load_all([written(tmp_path, "upsampler", UPSAMPLER, **changes)])
    assert len(str(caught.value).splitlines()) == 1


def test_base_experiment_without_samples_is_rejected(tmp_path):
    written(tmp_path, "base", {"data": BASE["data"], "system": {"type": "autoencoder"}, "train": {"steps": 1}})
    with pytest.raises(ValueError, match=r"sample\.small_images\.experiment makes no samples"):
        image_diffusion.experiments.resolve.load_all([written(tmp_path, "upsampler", UPSAMPLER)])


def command(main, monkeypatch, *arguments: str | Path) -> None:
    """Run a command in this process."""
    monkeypatch.setattr(sys, "argv", ["verb", *map(str, arguments)])
    main()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Results of an upsampler trained for two steps; its base experiment is configured only."""
    folder = tmp_path_factory.mktemp("upsampler")
    written(folder, "base", BASE)
    results = folder / "results"
    with pytest.MonkeyPatch.context() as patch:
        experiment = written(folder, "upsampler", UPSAMPLER)
        command(image_diffusion.tools.configure.main, patch, "--experiments", experiment, "--results", results)
        plan = json.loads((results / "upsampler/config/plan.json").read_text())
        manifest = results / "datasets/digits-16/crops/manifest.json"
        crop = ("--config", plan["configs"]["crop"], "--output", manifest, "--processes", "1")
        command(image_diffusion.stages.crop.main, patch, *crop)
        weights = results / "upsampler/train/weights.safetensors"
        train = ("--config", plan["configs"]["train"], "--data", manifest, "--output", weights)
        command(image_diffusion.stages.train.main, patch, *train)
    return results


def sampled(results: Path, folder: Path, monkeypatch, small_images: Any, *arguments: str | Path, **changes: Any) -> Any:
    """Run `sample` with these small images and changed settings; return the path of the arrays."""
    config = folder / "sample.yaml"
    config.write_text(yaml.safe_dump({"sample": {**UPSAMPLER["sample"], "small_images": small_images, **changes}}))
    weights = results / "upsampler/train/weights.safetensors"
    output = folder / "samples.npz"
    given = ("--config", config, "--weights", weights, "--output", output, *arguments)
    command(image_diffusion.stages.sample.main, monkeypatch, *given)
    return output


def test_plan_of_a_cascade_names_its_base_experiment(trained):
    plan = json.loads((trained / "upsampler/config/plan.json").read_text())
    assert plan["small_images_experiment"] == "base"
    assert json.loads((trained / "base/config/plan.json").read_text())["small_images_experiment"] is None
    assert list((trained / "upsampler/train/previews").glob("*/*.png"))


@pytest.mark.parametrize("source", ["path", "experiment"])
def test_upsampler_enlarges_small_images(trained, tmp_path, monkeypatch, source):
    small = save(tmp_path / "base.npz", pixels(side=8), np.array([0, 1, 2, 9, 4]))
    wanted = small if source == "path" else {"experiment": "base"}
    arguments = () if source == "path" else ("--small-images", small)
    with np.load(sampled(trained, tmp_path, monkeypatch, wanted, *arguments)) as arrays:
        assert arrays["arr_0"].shape == (4, 16, 16, 3)
        assert arrays["arr_1"].tolist() == [0, 1, 2, 9]


def test_small_images_without_labels_require_class_labels(trained, tmp_path, monkeypatch):
    small = save(tmp_path / "base.npz", pixels(side=8))
    with pytest.raises(ValueError, match=r"has no labels, but the network was trained with classes"):
        sampled(trained, tmp_path, monkeypatch, small)
    with np.load(sampled(trained, tmp_path, monkeypatch, small, labels=[7])) as arrays:
        assert arrays["arr_1"].tolist() == [7, 7, 7, 7]


def test_random_classes_are_those_of_the_seeds(trained, tmp_path, monkeypatch):
    classes = [str(number) for number in range(10)]
    expected = requested_labels("random", classes, torch.arange(4)).tolist()
    small = save(tmp_path / "base.npz", pixels(side=8))
    held_out = ("validation", "--small-images", trained / "datasets/digits-16/crops")
    for images in ((small,), held_out):
        with np.load(sampled(trained, tmp_path, monkeypatch, *images, labels="random")) as arrays:
            assert arrays["arr_1"].tolist() == expected


def test_held_out_images_are_enlarged_and_compared_with_their_originals(trained, tmp_path, monkeypatch):
    crops = trained / "datasets/digits-16/crops"
    path = sampled(trained, tmp_path, monkeypatch, "validation", "--small-images", crops, num_samples=6)
    held_out = open_shards(crops, "validation")
    samples = read_samples(path)
    assert samples.labels.tolist() == held_out.labels[:6].tolist()
    entries = evaluate_paired(samples, held_out, tmp_path)
    original = held_out.gather(np.arange(6))
    small = original.float().view(6, 3, 8, 2, 8, 2).mean((3, 5)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    large = np.stack([Image.fromarray(each).resize((16, 16), Image.Resampling.BICUBIC) for each in small])
    bicubic = torch.from_numpy(large).permute(0, 3, 1, 2)
    expected = psnr(original, samples.gather(np.arange(6)))
    assert entries["psnr"]["value"] == pytest.approx(float(expected.mean()))
    assert entries["psnr_bicubic"]["value"] == pytest.approx(float(psnr(original, bicubic).mean()), abs=0.05)
    assert entries["psnr_gain"]["value"] == pytest.approx(
        entries["psnr"]["value"] - entries["psnr_bicubic"]["value"], abs=1e-9
    )
    assert "psnr_mean" not in entries and (tmp_path / "enlarged.png").is_file()
    other = Samples(pixels(), None, [], digest="another")
    with pytest.raises(ValueError, match="data set has changed since its images were used as conditions"):
        evaluate_paired(samples, other)


def samples_of(images: np.ndarray, first_seed: int, digest: str) -> Samples:
    image = {"condition": {"type": "image", "from": "self", "shrink": 2}, "split": "validation", "data": digest}
    return Samples(images, None, [], protocol={"image": image, "settings": {"first_seed": first_seed, "seed": 0}})


@pytest.mark.parametrize("first_seed", [0, 2])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_mean_of_samples_has_higher_psnr_than_single_samples(first_seed, at_once, monkeypatch):
    monkeypatch.setattr(evaluation, "AT_ONCE", at_once)
    originals = Samples(np.random.default_rng(0).integers(60, 190, (3, 16, 16, 3), dtype=np.uint8), None, [], "set")
    rows = (first_seed + np.arange(9)) % 3
    signs = np.where(np.arange(9)[:, None, None, None] % 2, 1, -1) * np.arange(1, 10)[:, None, None, None]
    images = originals.gather(rows).permute(0, 2, 3, 1).numpy() + signs
    entries = evaluate_paired(samples_of(images.astype(np.uint8), first_seed, "set"), originals)
    each = 20 * np.log10(255 / np.arange(1, 10))
    assert entries["psnr"]["value"] == pytest.approx(np.mean([each[rows == row].mean() for row in range(3)]))
    offsets = [np.round(signs[rows == row].mean()) for row in range(3)]
    assert entries["psnr_mean"]["value"] == pytest.approx(np.mean([20 * np.log10(255 / abs(o)) for o in offsets]))
    assert entries["psnr_mean"]["value"] > entries["psnr"]["value"]


def test_unpaired_samples_are_not_compared():
    originals = Samples(pixels(side=16), None, [], "set")
    assert evaluate_paired(Samples(pixels(side=16), None, []), originals) == {}


SMALL = {
    "dit": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
    "iddpm": {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []},
    "rin": {"width": 16, "patch": 4, "depth": 1, "num_latents": 4, "num_heads": 1, "head_width": 8},
}


@pytest.mark.parametrize(("system", "degradation"), [("dit", "gray"), ("iddpm", "edges"), ("rin", "hole")])
def test_every_system_trains_and_samples_with_image_conditions(system, degradation, tmp_path, monkeypatch):
    """Two steps with the image and the class dropped in half of the cases, then guided samples of held-out images."""
    image = {"type": "image", "from": "self", degradation: {} if degradation == "hole" else True}
    process = {"process": {"type": "discrete", "num_timesteps": 20}} if system != "rin" else {}
    objective = {"type": "denoising", "prediction": "v", "label_drop_probability": 0.5}
    sample = {"num_samples": 4, "sampler": {"type": "ddim", "num_steps": 2}, "guidance": {"guidance_scale": 2}}
    sections = {
        "data": {**UPSAMPLER["data"], "resolution": 8},
        "system": {
            "type": system, "network": SMALL[system], "condition": [{"type": "label"}, image], "objective": objective,
            **process,
        },
        "train": UPSAMPLER["train"],
        "preview": sample,
        "sample": sample,
        "evaluate": UPSAMPLER["evaluate"],
    }  # fmt: skip
    results = tmp_path / "results"
    experiment = written(tmp_path, "seeing", sections)
    command(image_diffusion.tools.configure.main, monkeypatch, "--experiments", experiment, "--results", results)
    plan = json.loads((results / "seeing/config/plan.json").read_text())
    assert plan["small_images"] == "validation"
    crops, weights = results / "datasets/digits-8/crops", results / "seeing/train/weights.safetensors"
    crop = ("--config", plan["configs"]["crop"], "--output", crops / "manifest.json", "--processes", "1")
    command(image_diffusion.stages.crop.main, monkeypatch, *crop)
    train = ("--config", plan["configs"]["train"], "--data", crops / "manifest.json", "--output", weights)
    command(image_diffusion.stages.train.main, monkeypatch, *train)
    model = json.loads((weights.parent / "model.json").read_text())
    assert model["spec"]["conditions"] == {"image": [4 if degradation == "hole" else 1, 8, 8]}
    given = ("--config", plan["configs"]["sample"], "--weights", weights, "--small-images", crops)
    samples = [tmp_path / "once/samples.npz", tmp_path / "by_one/samples.npz"]
    command(image_diffusion.stages.sample.main, monkeypatch, *given, "--output", samples[0])
    one = ("--set", "sample.batch_size=1")
    command(image_diffusion.stages.sample.main, monkeypatch, *given, *one, "--output", samples[1])
    once, by_one = (read_samples(path) for path in samples)
    held_out = open_shards(crops, "validation")
    assert once.labels.tolist() == held_out.labels[:4].tolist()
    assert int((once.gather(np.arange(4)).int() - by_one.gather(np.arange(4)).int()).abs().max()) <= 1
    entries = evaluate_paired(once, held_out, tmp_path)
    assert set(entries) == {"psnr"} and (tmp_path / "paired.png").is_file()


def test_image_and_number_conditions_combine(trained):
    parts = [{"type": "label"}, {"type": "numbers"}, {"type": "image", "from": "self", "shrink": 4}]
    condition = parse(AnySystem, {"type": "rin", "condition": parts}, "x").conditioning
    rows = [{"age": 20, "label": "c"}, {"age": 40, "label": "a"}]
    settings = SampleConfig(num_samples=3, first_seed=1, conditions=rows)
    held_out = open_shards(trained / "datasets/digits-16/crops", "validation")
    pairs = {"numbers": {"columns": ["age"], "ranges": [[20.0, 60.0]]}}
    request = condition.sampling_request(
        ConditionInputs(settings, torch.arange(1, 4), pairs, image_source=ImageSource(SPEC, held_out))
    )
    assert {name: tuple(tensor.shape) for name, tensor in request.conditions.items()} == {
        "numbers": (3, 1, 2),
        "image": (3, 3, 4, 4),
    }
    assert request.classes == ["c", "a", "c"] and request.labels is None, "the rows say the classes"
    assert request.described.keys() == {"conditions", "image"} and request.titles[0] == "age 20"
