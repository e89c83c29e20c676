"""The crop with the compiled resize, and without it, equals the original formula by Pillow, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from crops import original
from image_diffusion.data.crop import centre_crop
from image_diffusion.data.crop.image import quiet_pillow

BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


@pytest.fixture(params=["compiled", "Pillow"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation of the resize."""
    if request.param == "Pillow":
        monkeypatch.setattr(centre_crop, "is_compiled", lambda: False)
    elif centre_crop.library() is None:
        pytest.skip("the resize is not compiled here: python setup.py build_ext --inplace")
    else:
        assert centre_crop.is_compiled()
    return str(request.param)


def noise(mode: str, width: int, height: int) -> Image.Image:
    """Return uniformly distributed bytes: adjacent extremes, which bicubic weights push beyond 0 and 255."""
    pixels = np.random.default_rng(width * 7919 + height).integers(-128, 384, (height, width, BANDS[mode]))
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels[:, :, 0] if mode == "L" else pixels, mode)


def assert_same(image: Image.Image, resolution: int) -> None:
    found, expected = centre_crop.centre_crop(image, resolution), original(image, resolution, image.mode)
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert (found == expected).all(), (image.mode, image.size, resolution)


sides = st.one_of(st.integers(1, 40), st.integers(1, 1200))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(BANDS)), sides, sides, st.one_of(st.integers(1, 64), st.integers(8, 1024)))
def test_any_image_at_any_resolution(by: str, mode: str, width: int, height: int, resolution: int) -> None:
    scaled = centre_crop.scaled_size(width, height, resolution)
    assume(scaled[0] * scaled[1] <= 2**21)
    assert_same(noise(mode, width, height), resolution)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_extremes(by: str, mode: str) -> None:
    sizes = [(1, 1), (1, 2), (2, 1), (1, 3000), (3000, 1), (7, 2999), (2999, 7), (16, 16), (32, 32), (33, 64), (31, 97)]
    for width, height in sizes:
        assert_same(noise(mode, width, height), 16)
    for ratio in range(90, 130):  # around the one from which Pillow 13 scales along the columns first
        assert_same(noise(mode, 80, ratio * 80 // 64), 64)
        assert_same(noise(mode, 130, ratio * 2), 64)


def test_pixels_lie_where_pillow_puts_them(by: str) -> None:
    image = noise("RGB", 80, 60)
    turned = image.transpose(Image.Transpose.ROTATE_90)
    padded = Image.frombuffer("RGB", (30, 20), bytes(range(256)) * 20, "raw", "RGB", 100, -1)
    assert_same(image.crop((11, 7, 61, 59)), 16)
    for each in (turned, padded, image.convert("L"), image.resize((80, 60))):
        assert_same(each, 16)


def test_several_blocks_of_memory(by: str) -> None:
    """4,100 x 1,100 pixels are 18 MB, more than a block has, except in `quiet_pillow`."""
    image = noise("L", 1025, 275).resize((4100, 1100), Image.Resampling.NEAREST).convert("RGB")
    with quiet_pillow():
        in_one = image.copy()
    assert_same(image, 500)
    assert_same(in_one, 500)
    assert_same(image, 600)
    assert_same(in_one, 600)
    if by == "compiled":
        with pytest.raises(ValueError, match="block|contiguous"):
            centre_crop.Pixels(image)
        centre_crop.Pixels(in_one)


def test_threads_crop_in_parallel(by: str) -> None:
    images = [noise("RGB", 200 + 3 * number, 300 - 5 * number) for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda image: centre_crop.centre_crop(image, 64), images))
    assert all((crop == original(image, 64)).all() for crop, image in zip(found, images, strict=True))


@pytest.fixture
def asked_again() -> Iterator[None]:
    centre_crop.is_compiled.cache_clear()
    yield
    centre_crop.is_compiled.cache_clear()


@pytest.mark.usefixtures("asked_again")
def test_compiled_resize_is_not_used_with_other_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow before 13 resizes along the rows first, for any shape."""

    def before_13(image: Image.Image, resolution: int) -> Image.Image:
        while min(image.size) >= 2 * resolution:
            image = image.resize((image.width // 2, image.height)).resize((image.width // 2, image.height // 2))
        return image.resize((resolution, resolution))

    monkeypatch.setattr(centre_crop, "pillow_crop", before_13)
    image = noise("RGB", 40, 60)
    assert not centre_crop.is_compiled()
    assert (centre_crop.centre_crop(image, 16) == np.asarray(before_13(image, 16))).all()


@pytest.mark.usefixtures("asked_again")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(centre_crop, "_COMPILED", tmp_path / "resize.compiled")
    centre_crop.library.cache_clear()
    try:
        assert centre_crop.library() is None and not centre_crop.is_compiled()
        assert_same(noise("RGB", 60, 40), 16)
    finally:
        centre_crop.library.cache_clear()
