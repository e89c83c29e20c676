"""Workflow from images with masks and numbers to samples of these, evaluated by a segmenter and exported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from projects import Project, warm_python

from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.data.shards.reader import open_shards
from tiny_autoencoders import write_autoencoder

pytestmark = pytest.mark.slow


def mask_of(path: Path) -> Image.Image:
    """Return a mask of 0 and 255: the pixels of an image that are brighter than its median."""
    with Image.open(path) as image:
        middle = sorted(image.convert("L").getdata())[image.width * image.height // 2]
        return image.convert("L").point(lambda level: 255 * (level > middle))


def write_masks(project: Project) -> tuple[list[Path], list[Path]]:
    """Write a mask for each image but the last one. Return the paths of all images and of their masks."""
    paths = sorted((project / "images").rglob("*.png"))
    masks = [project / "masks" / path.relative_to(project / "images").with_suffix(".bmp") for path in paths]
    for path, mask in list(zip(paths, masks, strict=True))[:-1]:
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask_of(path).save(mask)
    return paths, masks


def masked(data: dict[str, Any]) -> None:
    """Condition the network of an experiment on masks."""
    data["data"]["max_bad_fraction"] = 0.1
    data["pairs"] = {"type": "images", "path": "masks", "labels": {"dark": 0, "light": 255}}
    data["system"]["condition"] = [{"type": "label"}, {"type": "image", "from": "pairs"}]
    data["train"] |= {"grid_every_steps": 2, "steps": 2}
    data["preview"] = {"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 2}}
    data["sample"] |= {"guidance": {"guidance_scale": 2}}
    data["export"] = {"format": "pipeline"}


def test_masks_and_numbers_condition_samples_and_evaluation(fresh: Project) -> None:
    paths, masks = write_masks(fresh)
    numbered = [f"{path.relative_to(fresh / 'images')},{number}" for number, path in enumerate(paths)]
    (fresh / "numbers.csv").write_text("\n".join(["path,age", *numbered[1:]]))  # the first image has no number

    def with_numbers(data: dict[str, Any]) -> None:
        masked(data)
        data["pairs"] = [{"type": "numbers", "columns": ["age"], "table": "numbers.csv"}, data["pairs"]]
        data["system"]["condition"].append({"type": "numbers"})

    fresh.edit(with_numbers)
    fresh.run()
    manifest = json.loads((fresh / "results/datasets/dots-16/images/manifest.json").read_text())
    assert (manifest["kind"], manifest["num_samples"], manifest["quarantined"]) == ("images", 63, 1)
    assert paths[-1].name in (fresh / "results/datasets/dots-16/images/quarantine.csv").read_text()
    said = json.loads((fresh / "results/micro/samples/samples.json").read_text())
    made = said["image"]
    assert (made["split"], made["labels"]) == ("validation", ["dark", "light"])
    assert said["conditions"]["data"] == made["data"] and set(said["conditions"]["values"]) == {"age"}
    model = json.loads((fresh / "results/micro/train/model.json").read_text())
    assert list(model["pairs"]) == ["images", "numbers"]
    metrics = json.loads((fresh / "results/micro/metrics.json").read_text())["metrics"]
    judged = [metrics[name] for name in ("mask_iou", "mask_iou_dark", "mask_iou_light")]
    assert all(0 <= entry["value"] <= 1 and entry["floor_n"] for entry in judged)
    assert judged[0]["floor"] > 0.7, "of real images the segmenter finds the masks"
    assert "psnr" not in metrics and (fresh / "results/micro/evaluation/paired.png").is_file()
    report = (fresh / "results/micro/report/index.html").read_text()
    assert f"overlap with the requested ones by {judged[0]['value']:.1%}" in report
    assert list((fresh / "results/micro/train/previews").rglob("step-0000002.png"))
    assert fresh.planned() == set()

    held_out = open_shards(fresh / "results/datasets/dots-16/crops", "validation")
    images = open_shards(fresh / "results/datasets/dots-16/images", "all")
    numbers = open_shards(fresh / "results/datasets/dots-16/numbers", "all")
    count = held_out.join(images).join(numbers).num_samples
    assert numbers.num_samples == images.num_samples == count < 63 == manifest["num_samples"]
    assert count > 0 and torch.equal(images.gather([0]).unique(), torch.tensor([0, 1], dtype=torch.uint8))

    command = [warm_python(), "-m", "image_diffusion", "sample", "micro", "--num", "3", "--label", "light", "--set"]
    named = [str(mask.relative_to(fresh.folder)) for mask in masks[:2]]
    conditions = f"sample.conditions={{label: [dark, light], image: [{named[0]}, {named[1]}]}}"
    for words in ([*command, "sample.small_images=masks"], [*command[:-3], command[-1], conditions]):
        drawn = subprocess.run(words, cwd=fresh.folder, capture_output=True, text=True, check=False)
        assert drawn.returncode == 0, drawn.stdout + drawn.stderr
        assert "split" not in json.loads((fresh / "drawn/micro/samples.json").read_text())["image"]

    rows = [{"image": name, "label": "dark"} for name in named]

    def of_rows(data: dict[str, Any]) -> None:
        data["sample"]["conditions"] = rows

    fresh.edit(of_rows)
    fresh.run()
    made = json.loads((fresh / "results/micro/samples/samples.json").read_text())["image"]
    metrics = json.loads((fresh / "results/micro/metrics.json").read_text())["metrics"]
    assert "split" not in made and "mask_iou" not in metrics and fresh.planned() == set()
    plain = masks[1].read_bytes()
    Image.open(masks[1]).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(masks[1])
    assert "sample" in fresh.planned(), "an image that a row names has changed"
    masks[1].write_bytes(plain)
    fresh.edit(lambda data: data["sample"].pop("conditions"))
    fresh.run()

    mask_of(paths[0]).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(masks[0])
    assert {"embed", "train", "sample", "evaluate"} <= fresh.planned() and "crop" not in fresh.planned()
    assert fresh.planned("results/datasets/dots-16/numbers/manifest.json") == set()
    before = [shard["sha256"] for shard in manifest["shards"]]
    fresh.run()
    after = json.loads((fresh / "results/datasets/dots-16/images/manifest.json").read_text())["shards"]
    assert sum(shard["sha256"] != sha256 for shard, sha256 in zip(after, before, strict=True)) == 1
    assert fresh.planned() == set()


@pytest.mark.long
def test_masks_condition_samples_and_evaluation_of_latent_model(fresh: Project) -> None:
    diffusers = pytest.importorskip("diffusers")
    write_masks(fresh)
    write_autoencoder("kl4", fresh / "vae")

    def on_latents(data: dict[str, Any]) -> None:
        masked(data)
        data["codec"] = {"type": "diffusers", "weights": "vae"}
        data["train"]["flip_probability"] = 0.5

    fresh.edit(on_latents)
    fresh.run()
    spec = json.loads((fresh / "results/micro/train/model.json").read_text())["spec"]
    assert (spec["channels"], spec["resolution"], spec["conditions"]) == (4, 8, {"image": [2, 16, 16]})
    metrics = json.loads((fresh / "results/micro/metrics.json").read_text())["metrics"]
    assert 0 <= metrics["mask_iou"]["value"] <= 1 and metrics["mask_iou"]["floor"] > 0.7
    assert list((fresh / "results/micro/train/previews").rglob("step-0000002-conditions.png"))
    assert (fresh / "results/micro/samples/conditions.png").is_file() and fresh.planned() == set()

    images = open_shards(fresh / "results/datasets/dots-16/images", "all")
    held_out = open_shards(fresh / "results/datasets/dots-16/crops", "validation").join(images)
    (masks,) = held_out.gather_joined(np.arange(2))
    sampled = read_arrays(fresh / "results/micro/samples/samples.npz")
    folder = str(fresh / "results/micro/diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    made = pipeline(
        seeds=[0, 1],
        class_labels=sampled["arr_1"][:2].tolist(),
        image=torch.cat([masks == 0, masks == 1], dim=1).float() * 2 - 1,
        sampler={"type": "ddim", "num_steps": 2},
        guidance_scale=2,
        output_type="np",
    ).images
    assert np.abs(made.astype(int) - sampled["arr_0"][:2].astype(int)).max() <= 1
