"""The crop is the original's, byte for byte; the fast resize is a stated distance away."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.images import crop_image, quiet_pillow

PHOTOGRAPHS = Path(
    os.environ.get("IMAGE_DIFFUSION_PHOTOGRAPHS", Path(__file__).resolve().parents[3] / "shared/data/imagenet-240.tar")
)
photographs_present = pytest.mark.skipif(not PHOTOGRAPHS.is_file(), reason=f"{PHOTOGRAPHS} is not there")


def original(image: Image.Image, size: int) -> np.ndarray:
    """The formula as guided-diffusion states it: one resize of the whole image, then the centre cut out."""
    image = image.convert("RGB")
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    new_size = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(new_size, resample=Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(data: bytes, resolution: int, resize: str = "exact") -> np.ndarray:
    """Our crop as [H, W, C]."""
    config = DataConfig(name="x", source={"type": "digits"}, resolution=resolution, resize=resize)  # type: ignore[arg-type]
    with quiet_pillow():
        return crop_image(data, config).pixels.transpose(1, 2, 0)


def photographs() -> Iterator[tuple[str, bytes]]:
    with tarfile.open(PHOTOGRAPHS) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def test_golden_synthetic_images(golden: Callable[[str], Any]) -> None:
    file = golden("p01_center_crop.npz")
    cases = [case for case in file if case.startswith("synthetic")]
    assert len(cases) == 5
    for case in cases:
        image, expected = file[f"{case}/image"].numpy(), file[f"{case}/crop"].numpy()
        assert (crop(png(image), file.params(case)["size"]) == expected).all(), case


@photographs_present
def test_golden_photographs(golden: Callable[[str], Any]) -> None:
    file = golden("p01_center_crop.npz")
    found = 0
    for name, data in photographs():
        stem = Path(name).stem
        for case in (case for case in file if case.endswith(stem)):
            for size in (64, 256):
                assert (crop(data, size) == file[f"{case}/crop_{size}"].numpy()).all(), (case, size)
                found += 1
    assert found >= 2


@photographs_present
@pytest.mark.parametrize("resolution", [64, 256, 512])
def test_every_photograph_is_cropped_as_by_the_original(resolution: int) -> None:
    count = 0
    for name, data in photographs():
        assert (crop(data, resolution) == original(Image.open(io.BytesIO(data)), resolution)).all(), name
        count += 1
    assert count == 240


@photographs_present
@pytest.mark.parametrize("resolution", [64, 256])
def test_the_fast_resize_is_at_most_two_levels_off(resolution: int) -> None:
    for number, (name, data) in enumerate(photographs()):
        if number % 4 == 0:
            difference = crop(data, resolution, "fast").astype(int) - crop(data, resolution)
            assert np.abs(difference).max() <= 2, name


def test_any_size_is_cropped_as_by_the_original() -> None:
    generator = np.random.default_rng(0)
    for _ in range(600):
        height, width = generator.integers(1, 150, 2)
        resolution = int(generator.integers(1, 70))
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = original(Image.fromarray(pixels), resolution)
        assert (crop(png(pixels), resolution) == expected).all(), (width, height, resolution)


def test_the_fast_resize_is_at_most_two_levels_off_on_smooth_images() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        height, width = generator.integers(8, 150, 2)
        resolution = int(generator.integers(4, 70))
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        data = png(np.asarray(coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC)))
        difference = crop(data, resolution, "fast").astype(int) - crop(data, resolution)
        assert np.abs(difference).max() <= 2, (width, height, resolution)
