"""The crop equals the original's, byte for byte."""

import hashlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

import photographs
from crops import crop, original


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


@pytest.mark.parametrize("name", ["china", "flower"])
def test_golden_photographs(golden: Callable[[str], Any], name: str) -> None:
    """The two of scikit-learn; `make test-photographs` takes 240 of ImageNet."""
    params, data = golden("p01_center_crop.npz").params(name), (photographs.FOLDER / f"{name}.jpg").read_bytes()
    assert hashlib.sha256(data).hexdigest() == params["jpeg_sha256"]
    for size, digest in params["crop_sha256"].items():
        pixels = crop(data, int(size))
        assert (pixels == original(Image.open(io.BytesIO(data)), int(size))).all()
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == digest, size


def test_crops_of_any_size_equal_original() -> None:
    generator = np.random.default_rng(0)
    for _ in range(600):
        height, width = generator.integers(1, 150, 2)
        resolution = int(generator.integers(1, 70))
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = original(Image.fromarray(pixels), resolution)
        assert (crop(png(pixels), resolution) == expected).all(), (width, height, resolution)
