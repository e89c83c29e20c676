"""One graph from a folder of masks beside the images to images of those masks, judged by a segmenter and exported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from projects import Project, warm_python

from image_diffusion.data.shards.reader import open_shards

pytestmark = pytest.mark.slow


def mask_of(path: Path) -> Image.Image:
    """Return which half of an image is the brighter one, of 0 and 255."""
    with Image.open(path) as image:
        middle = sorted(image.convert("L").getdata())[image.width * image.height // 2]
        return image.convert("L").point(lambda level: 255 * (level > middle))


def test_masks_of_a_folder_lead_to_images_that_are_judged_by_them(fresh: Project) -> None:
    paths = sorted((fresh / "images").rglob("*.png"))
    masks = [fresh / "masks" / path.relative_to(fresh / "images").with_suffix(".bmp") for path in paths]
    for path, mask in list(zip(paths, masks, strict=True))[:-1]:  # the last image has no mask
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask_of(path).save(mask)

    def masked(data: dict[str, Any]) -> None:
        data["data"]["max_bad_fraction"] = 0.1
        data["pairs"] = {"type": "images", "path": "masks", "labels": {"dark": 0, "light": 255}}
        data["system"]["condition"] = [{"type": "label"}, {"type": "image", "from": "pairs"}]
        data["train"] |= {"grid_every_steps": 2, "steps": 2}
        data["preview"] = {"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 2}}
        data["sample"] |= {"guidance": {"guidance_scale": 2}}
        data["export"] = {"format": "pipeline"}

    fresh.edit(masked)
    fresh.run()
    manifest = json.loads((fresh / "results/datasets/dots-16/images/manifest.json").read_text())
    assert (manifest["kind"], manifest["num_samples"], manifest["quarantined"]) == ("images", 63, 1)
    assert paths[-1].name in (fresh / "results/datasets/dots-16/images/quarantine.csv").read_text()
    made = json.loads((fresh / "results/micro/samples/samples.json").read_text())["image"]
    assert (made["split"], made["labels"]) == ("validation", ["dark", "light"])
    metrics = json.loads((fresh / "results/micro/metrics.json").read_text())["metrics"]
    judged = [metrics[name] for name in ("mask_iou", "mask_iou_dark", "mask_iou_light")]
    assert all(0 <= entry["value"] <= 1 and entry["floor_n"] for entry in judged)
    assert judged[0]["floor"] > 0.7, "of real images the segmenter finds the masks"
    assert "psnr" not in metrics and (fresh / "results/micro/evaluation/paired.png").is_file()
    assert list((fresh / "results/micro/train/previews").rglob("step-0000002.png"))
    assert fresh.planned() == set()

    held_out = open_shards(fresh / "results/datasets/dots-16/crops", "validation")
    images = open_shards(fresh / "results/datasets/dots-16/images", "all")
    count = held_out.join(images).num_samples
    assert 0 < count < 63 and torch.equal(images.gather([0]).unique(), torch.tensor([0, 1], dtype=torch.uint8))

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
    before = [shard["sha256"] for shard in manifest["shards"]]
    fresh.run()
    after = json.loads((fresh / "results/datasets/dots-16/images/manifest.json").read_text())["shards"]
    assert sum(shard["sha256"] != sha256 for shard, sha256 in zip(after, before, strict=True)) == 1
    assert fresh.planned() == set()
