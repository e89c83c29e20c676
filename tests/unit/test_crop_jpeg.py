"""Damaged JPEGs give no crop, and intact JPEGs do."""

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.image import Crop, crop_image, quiet_pillow

PIXELS = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((50, 37))
)


def jpeg(mode: str = "RGB", turned: int | None = None, **options: Any) -> bytes:
    """Return a JPEG photograph of 50 x 37 pixels."""
    buffer = io.BytesIO()
    if turned is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = turned
    Image.fromarray(PIXELS).convert(mode).save(buffer, options.pop("format", "jpeg"), **options)
    return buffer.getvalue()


def crop(data: bytes) -> Crop:
    config = {"name": "x", "source": {"type": "digits"}, "resolution": 16}
    with quiet_pillow():
        return crop_image(data, DataConfig.model_validate(config))


def test_random_damage_gives_a_crop_or_a_bad_image() -> None:
    chance = random.Random(0)
    data = jpeg(turned=6)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        damaged = damaged[: chance.randrange(len(data))] if chance.random() < 0.2 else damaged
        try:
            assert crop(bytes(damaged)).crops[0].shape == (3, 16, 16)
        except BadImage as error:
            assert str(error)


def test_sizes_are_judged_by_the_header() -> None:
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(BadImage, match="too large: 65535 x 65535 pixels"):
        crop(bytes(data))
    data[at : at + 2] = b"\0\0"
    with pytest.raises(BadImage, match="not an image"):
        crop(bytes(data))


def photograph(**options: Any) -> bytes:
    """Return a JPEG of 400 x 300 pixels and about 40 KB."""
    noise = np.random.default_rng(1).integers(0, 256, (75, 100, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((400, 300), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=90, **options)
    return buffer.getvalue()


def flat(colour: int, **options: Any) -> bytes:
    """Return a drawing on a plain background; with optimised Huffman tables its data have long runs of zeros."""
    image = Image.new("RGB", (2000, 1500), (colour,) * 3)
    image.paste((200, 30, 40), (500, 500, 900, 700))
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", **options)
    return buffer.getvalue()


def middle(data: bytes) -> int:
    return (data.index(b"\xff\xda") + len(data)) // 2


END = b"\xff\xd9"
FILLED_UP: dict[str, bytes] = {
    "cut, and ended": (data := photograph())[: middle(data)] + END,
    "cut near its end, and ended": data[: len(data) - 500] + END,
    "second half zeros": data[: middle(data)] + bytes(len(data) - middle(data) - 2) + END,
    "a block of zeros": data[: middle(data)] + bytes(4096) + data[middle(data) + 4096 :],
    "a block lost": data[: middle(data)] + data[middle(data) + 4096 :],
    "restarts, cut, and ended": (rows := photograph(restart_marker_rows=1))[: middle(rows)] + END,
    "restarts, a block of zeros": rows[: middle(rows)] + bytes(4096) + rows[middle(rows) + 4096 :],
    "restarts, a block lost": rows[: middle(rows)] + rows[middle(rows) + 4096 :],
    "progressive, cut, and ended": (scans := photograph(progressive=True))[: scans.index(b"\xff\xda") + 2000] + END,
    "grey, cut, and ended": (grey := jpeg("L", quality=100))[: middle(grey)] + END,
    "four colours, cut, and ended": (inks := jpeg("CMYK", quality=100))[: middle(inks)] + END,
}
WHOLE: dict[str, bytes] = {
    f"{name}, {colour}": flat(colour, **options)
    for colour in (0, 128, 255)
    for name, options in {
        "plain": {},
        "own tables": {"optimize": True},
        "progressive": {"progressive": True},
        "own tables and restarts": {"optimize": True, "restart_marker_rows": 1},
    }.items()
} | {
    "restarts": rows,
    "zeros before its end": data[:-2] + bytes(600) + END,
    "zeros behind its end": data + bytes(5000),
    "zeros in a comment": photograph(comment=bytes(5000)),
}


@pytest.mark.parametrize("kind", FILLED_UP)
def test_pixels_filled_in_by_the_decoder_count_as_damage(kind: str) -> None:
    with pytest.raises(BadImage, match="^damaged: its data end too early or have a hole"):
        crop(FILLED_UP[kind])


@pytest.mark.parametrize("kind", WHOLE)
def test_grey_corners_and_zeros_of_intact_jpegs_are_not_damage(kind: str) -> None:
    assert crop(WHOLE[kind]).crops[0].shape == (3, 16, 16)


def test_some_whole_jpegs_hold_long_runs_of_zeros() -> None:
    assert sum(bytes(512) in data for data in WHOLE.values()) > 4
