"""Several crops of an image: torchvision's random crops, squares along a long image; all crops in one split."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import image_diffusion.data.encoded.captions as captions_module
from image_diffusion.core.config.base import parse
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.methods import MultiCrop, RandomResizedCrop
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record
from image_diffusion.stages.datasheet import write_datasheet
from image_diffusion.systems.pairs.captions import CaptionPairs
from image_diffusion.systems.pairs.inputs import PairInputs

RANDOM = {"type": "random_resized", "num_crops": 3, "scale": [0.3, 1.0]}
WHITE = (255, 255, 255)


def image_of(width: int, height: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng([width, seed]).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def settings(folder: Path, crop: dict[str, Any], **changes: Any) -> DataConfig:
    values = {"name": "x", "source": {"type": "folder", "path": str(folder), "classes": "none"}, "resolution": 32}
    return DataConfig.model_validate({**values, "num_shards": 3, "crop": crop, **changes})


def write_images(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        image_of(48 + 8 * (number % 3), 40 + 16 * (number % 2), number).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number}\n")
    return folder


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_crops_equal_torchvision_bytes(interpolation: Any) -> None:
    from torchvision import transforms
    from torchvision.transforms import functional

    image, crop = image_of(90, 57), RandomResizedCrop(num_crops=5, interpolation=interpolation)
    draw = np.random.default_rng([0, *hashlib.sha256(b"file").digest()])
    for found in crop.crops(image, 32, WHITE, b"file"):
        left, top, right, bottom = crop.box(90, 57, draw)
        how = transforms.InterpolationMode(interpolation)
        expected = functional.resized_crop(image, top, left, bottom - top, right - left, [32, 32], how)
        assert (found == np.asarray(expected)).all()


@pytest.mark.parametrize("size", [(90, 57), (40, 300)])
def test_random_crop_boxes_are_distributed_as_in_torchvision(size: tuple[int, int]) -> None:
    from scipy.stats import ks_2samp
    from torchvision import transforms

    crop, draw, image = RandomResizedCrop(), np.random.default_rng(0), image_of(*size)
    ours = np.array([crop.box(*size, draw) for _ in range(3000)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = np.array([
            transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)
        ])  # fmt: skip
    theirs = np.stack([theirs[:, 1], theirs[:, 0], theirs[:, 1] + theirs[:, 3], theirs[:, 0] + theirs[:, 2]], axis=1)
    for mine, other in zip(ours.T, theirs.T, strict=True):
        assert ks_2samp(mine, other).pvalue > 1e-3
    area = [(found[:, 2] - found[:, 0]) * (found[:, 3] - found[:, 1]) for found in (ours, theirs)]
    assert ks_2samp(*area).pvalue > 1e-3


def test_random_crop_falls_back_to_the_centre() -> None:
    crop, draw = RandomResizedCrop(scale=(1, 1), ratio=(1, 1)), np.random.default_rng(0)
    assert crop.box(100, 10, draw) == (45, 0, 55, 10) and crop.box(1, 9, draw) == (0, 4, 1, 5)


@pytest.mark.parametrize(
    ("size", "count"), [((64, 64), 1), ((69, 64), 1), ((96, 64), 2), ((64, 128), 2), ((200, 64), 4), ((64, 900), 4)]
)
def test_square_crops_cover_a_long_image(size: tuple[int, int], count: int) -> None:
    image = image_of(*size)
    found = MultiCrop().crops(image, 32, WHITE, b"")
    assert [each.shape for each in found] == [(32, 32, 3)] * count
    width, height = MultiCrop().scaled_size(*size, 32)
    halved = image.resize((size[0] // 2, size[1] // 2), Image.Resampling.BOX)
    whole = np.asarray(halved.resize((width, height), Image.Resampling.BICUBIC))
    axis, long = (1, width) if width >= height else (0, height)
    if count == 1:
        start = (long - 32) // 2
        assert (found[0] == np.take(whole, range(start, start + 32), axis)).all()
        return
    assert (found[0] == np.take(whole, range(32), axis)).all()
    assert (found[-1] == np.take(whole, range(long - 32, long), axis)).all()
    assert all((first != second).any() for first, second in pairwise(found))


@pytest.mark.parametrize("crop", [RANDOM, {"type": "multi"}], ids=["random", "multi"])
def test_the_crops_of_an_image_share_its_split_and_its_captions(tmp_path: Path, crop: dict[str, Any]) -> None:
    folder = write_images(tmp_path / "in")
    config = settings(folder, crop, validation_fraction=0.3)
    done = crop_dataset(config, tmp_path / "crops")
    samples = [each for record in done.records for each in record.samples]
    views: dict[str, list[int]] = {}
    for each in samples:
        views.setdefault(each.path, []).append(each.view)
    assert len(views) == 12 and all(found == list(range(len(found))) for found in views.values())
    assert done.manifest["num_samples"] == len(samples) > 12
    if crop is RANDOM:
        assert len(samples) == 36 and len({each.pixels for each in samples}) == 36
    held_out = open_shards(tmp_path / "crops", "all").held_out()
    by_image = {each.path: set() for each in samples}
    for each, is_held_out in zip(samples, held_out.tolist(), strict=True):
        by_image[each.path].add(is_held_out)
    assert all(len(found) == 1 for found in by_image.values()) and 0 < held_out.sum() < len(samples)

    captions_module._caption_columns.cache_clear()
    pairs = parse(CaptionPairs, {"captions": {"type": "beside"}, "num_tokens": 2}, "pairs")
    made = pairs.build(PairInputs(tmp_path / "crops", config.source, 3, None, torch.device("cpu")))
    manifest, _ = write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path / "captions", 0.0)
    assert manifest["num_samples"] == len(samples)
    joined = open_shards(tmp_path / "crops", "all").join(open_shards(tmp_path / "captions", "all"))
    (beside,) = joined.gather_joined(np.arange(len(samples)))
    first = {each.path: row for row, each in reversed(list(enumerate(samples)))}
    assert all(torch.equal(beside[row], beside[first[each.path]]) for row, each in enumerate(samples))
    assert len({tuple(row.flatten().tolist()) for row in beside}) == 12

    sheet = write_datasheet(tmp_path / "crops", tmp_path / "sheet", None)
    assert sheet["num_samples"] == 12 and not sheet["groups"]


def test_random_crops_depend_only_on_image_and_seed(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "in")

    def pixels(name: str, processes: int = 1, **changes: Any) -> dict[tuple[str, int], str]:
        done = crop_dataset(settings(folder, {**RANDOM, **changes}), tmp_path / name, processes=processes)
        return {(each.path, each.view): each.pixels for record in done.records for each in record.samples}

    one, again, other = pixels("one"), pixels("two", processes=2), pixels("seed", seed=1)
    assert one == again and not set(one.values()) & set(other.values())
    (folder / "00.png").rename(folder / "moved.png")
    renamed = pixels("one")
    assert [renamed["moved.png", view] for view in range(3)] == [one["00.png", view] for view in range(3)]
    assert crop_dataset(settings(folder, RANDOM), tmp_path / "one").num_written == 0


def test_all_crops_of_a_duplicate_are_dropped(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "in", 6)
    (folder / "twice.png").write_bytes((folder / "03.png").read_bytes())
    done = crop_dataset(settings(folder, RANDOM, duplicates="drop"), tmp_path / "crops")
    assert done.manifest["num_samples"] == 18 and done.manifest["dropped"] == 1
    table = (tmp_path / "crops" / "quarantine.csv").read_text().splitlines()
    assert len(table) == 2 and table[1].startswith("twice.png,the same crop as 03.png")
    records = [read_record(tmp_path / "crops", shard) for shard in range(3)]
    assert sorted(each.view for record in records for each in record.dropped) == [0, 1, 2]
    assert crop_dataset(settings(folder, RANDOM, duplicates="drop"), tmp_path / "crops").num_written == 0


def test_near_duplicate_moves_all_crops_of_a_held_out_image(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "in", 12)
    for path in sorted(folder.glob("*.png"))[:8]:
        Image.open(path).save(path.with_suffix(".bmp"))  # another file of the same pixels: it may be in the other split
    config = settings(folder, {"type": "multi"}, validation_fraction=0.4)
    done = crop_dataset(config, tmp_path / "crops")
    samples = [each for record in done.records for each in record.samples]
    held_out = open_shards(tmp_path / "crops", "all").held_out().tolist()
    by_picture: dict[str, set[bool]] = {}
    for each, is_held_out in zip(samples, held_out, strict=True):
        by_picture.setdefault(each.path.partition(".")[0], set()).add(is_held_out)
    assert done.manifest["not_held_out"] and all(len(found) == 1 for found in by_picture.values())


def test_invalid_scale_ranges_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\[0\.5, 0\.1\] is not a range"):
        RandomResizedCrop(scale=(0.5, 0.1))
    with pytest.raises(ValueError, match=r"scale ends at 2\.0, but no part is larger"):
        RandomResizedCrop(scale=(0.5, 2.0))
