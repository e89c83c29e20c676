"""Crop types other than ADM's equal torchvision's transforms and Pillow's pad byte for byte."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from image_diffusion.core.config.base import parse
from image_diffusion.core.files.atomic import digest
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.stages.datasheet import write_datasheet

SIZES = [(64, 64), (65, 97), (97, 65), (33, 200), (201, 130), (20, 31), (128, 64), (63, 61)]


def image_of(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert("RGBA").convert(mode)


def crop(image: Image.Image, **data: Any) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    config = DataConfig.model_validate({"name": "x", "source": {"type": "digits"}, "resolution": 32} | data)
    with quiet_pillow():
        return crop_image(buffer.getvalue(), config).crops[0].transpose(1, 2, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_resize_equals_torchvision_byte_for_byte(size: tuple[int, int], mode: str, interpolation: str) -> None:
    from torchvision import transforms

    image = image_of(*size, mode)
    resize = transforms.Resize(32, transforms.InterpolationMode(interpolation))
    expected = np.asarray(transforms.CenterCrop(32)(resize(image))).reshape(32, 32, -1)
    found = crop(image, crop={"type": "resize", "interpolation": interpolation}, channels=len(image.getbands()))
    assert (found == expected).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pad_equals_pillow_byte_for_byte(size: tuple[int, int], mode: str) -> None:
    image = image_of(*size, mode)
    expected = ImageOps.pad(image, (32, 32), Image.Resampling.BICUBIC, color="#0ac81e")
    found = crop(image, crop={"type": "pad"}, background=(10, 200, 30), channels=len(image.getbands()))
    assert (found == np.asarray(expected).reshape(32, 32, -1)).all()


@pytest.mark.parametrize("size", SIZES)
def test_pad_keeps_the_whole_image(size: tuple[int, int]) -> None:
    image, colour = image_of(*size), (10, 200, 30)
    found = crop(image, crop={"type": "pad"}, background=colour)
    scale = 32 / max(size)
    width, height = (max(1, round(side * scale)) for side in size)
    left, top = round((32 - width) / 2), round((32 - height) / 2)
    inside = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    assert (found[top : top + height, left : left + width] == inside).all()
    outside = np.ones((32, 32), bool)
    outside[top : top + height, left : left + width] = False
    assert (found[outside] == colour).all()


def test_padding_of_images_with_alpha_is_transparent() -> None:
    found = crop(image_of(64, 32, "RGBA"), crop={"type": "pad"}, channels=4)
    assert (found[:8, :, 3] == 0).all() and found[8:24, :, 3].any()
    found = crop(image_of(64, 32, "LA"), crop={"type": "pad"}, channels=2)
    assert (found[:8, :, 1] == 0).all() and found[8:24, :, 1].any()


def test_thin_images_are_rejected_by_resize_but_not_by_pad() -> None:
    with pytest.raises(BadImage, match="too thin"):
        crop(image_of(2000, 1), crop={"type": "resize"}, max_pixels=2000)
    assert (crop(image_of(2000, 1), crop={"type": "pad"}, max_pixels=2000) != 255).any((1, 2)).sum() == 1


def test_crop_types_have_different_identities_and_adm_keeps_its_own() -> None:
    data = {"name": "x", "source": {"type": "digits"}, "resolution": 32}
    kinds = [{"type": "resize"}, {"type": "resize", "interpolation": "bicubic"}, {"type": "pad"}, {"type": "adm"}]
    every = [DataConfig.model_validate(data | {"crop": kind}).crop_identity() for kind in kinds]
    assert len({digest(each) for each in every}) == 4
    assert every[-1] == DataConfig.model_validate(data).crop_identity() == {
        "method": "adm-centre-crop", "version": 1, "resolution": 32, "channels": 3, "resize": "exact",
        "background": [255, 255, 255], "min_side": 1, "max_pixels": 90_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("value", ["fast", "exact"])
def test_removed_resize_key_is_reported_in_one_line_with_advice(value: str) -> None:
    data = {"name": "x", "source": {"type": "digits"}, "resolution": 32, "resize": value}
    with pytest.raises(ValueError, match=f"resize: {value} was removed.*Delete the key resize") as caught:
        parse(DataConfig, data, "x.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_data_sheet_reports_the_share_cut_away(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, size in enumerate([(64, 20), (90, 30), (80, 20)]):
        image_of(*size).save(tmp_path / f"in/{number}.png")
    found = {}
    for kind in ("resize", "pad"):
        data = {"name": "x", "source": {"type": "folder", "path": str(tmp_path / "in")}, "resolution": 32}
        crop_dataset(DataConfig.model_validate(data | {"crop": {"type": kind}}), tmp_path / kind)
        found[kind] = write_datasheet(tmp_path / kind, tmp_path / "sheet", None)
    assert found["resize"]["measures"]["share cut away"][-1] == 0.75
    assert found["pad"]["measures"]["share cut away"][-1] == 0.0
    kinds = {kind: {each["kind"] for each in sheet["findings"]} for kind, sheet in found.items()}
    assert "cut" in kinds["resize"] and "cut" not in kinds["pad"]
