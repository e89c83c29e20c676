"""The header of a JPEG: what Pillow says of the same file, and Pillow itself is asked where there is any doubt."""

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.images import BadImage, Crop, crop_image, quiet_pillow
from image_diffusion.data.jpeg import JpegHeader, plain_header

PIXELS = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((50, 37))
)


def jpeg(mode: str = "RGB", turned: int | None = None, **options: Any) -> bytes:
    """A photograph of 50 x 37 pixels."""
    buffer = io.BytesIO()
    if turned is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = turned
    Image.fromarray(PIXELS).convert(mode).save(buffer, options.pop("format", "jpeg"), **options)
    return buffer.getvalue()


def crop(data: bytes, resize: str = "fast") -> Crop:
    config = {"name": "x", "source": {"type": "digits"}, "resolution": 16, "resize": resize}
    with quiet_pillow():
        return crop_image(data, DataConfig.model_validate(config))


PLAIN = {
    "colour": (jpeg(), JpegHeader((50, 37), 3, False)),
    "grey": (jpeg("L"), JpegHeader((50, 37), 1, False)),
    "progressive": (jpeg(progressive=True), JpegHeader((50, 37), 3, False)),
    "comment and profile": (
        jpeg(comment=b"Exif, but a comment", icc_profile=b"x" * 70_000),
        JpegHeader((50, 37), 3, True),
    ),
    "restarts": (jpeg(restart_marker_blocks=1), JpegHeader((50, 37), 3, False)),
    "not subsampled": (jpeg(subsampling="4:4:4"), JpegHeader((50, 37), 3, False)),
    "upright by Exif": (jpeg(turned=1), JpegHeader((50, 37), 3, True)),
    "turned by Exif": (jpeg(turned=6), JpegHeader((50, 37), 3, True)),
    "four colours": (jpeg("CMYK"), None),
    "several pictures": (jpeg(format="mpo", save_all=True, append_images=[Image.new("RGB", (9, 9))]), None),
    "no JPEG": (b"\x89PNG" + bytes(100), None),
    "a start and nothing else": (b"\xff\xd8", None),
    "a start and text": (b"\xff\xd8" + b"text" * 30, None),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_the_header_says_what_pillow_says(kind: str) -> None:
    data, expected = PLAIN[kind]
    found = plain_header(data)
    assert found == expected
    if found is not None:
        with Image.open(io.BytesIO(data)) as image:
            assert found.size == image.size and {1: "L", 3: "RGB"}[found.components] == image.mode


@pytest.mark.parametrize("kind", [kind for kind, (data, _) in PLAIN.items() if len(data) > 200])
def test_the_fast_crop_is_near_the_exact_one(kind: str) -> None:
    data, _ = PLAIN[kind]
    fast, exact = crop(data), crop(data, "exact")
    assert (fast.size, fast.flags) == (exact.size, exact.flags)
    assert np.abs(fast.squares[0].astype(int) - exact.squares[0]).max() <= 2


def test_damage_anywhere_is_a_bad_image_or_an_image() -> None:
    chance = random.Random(0)
    data = jpeg(turned=6)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        plain_header(bytes(damaged[: chance.randrange(len(data))]))
        try:
            assert crop(bytes(damaged)).squares[0].shape == (3, 16, 16)
        except BadImage as error:
            assert str(error)


def test_sizes_are_judged_by_the_header() -> None:
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(BadImage, match="too large: 65535 x 65535 pixels"):
        crop(bytes(data))
    data[at : at + 2] = b"\0\0"
    with pytest.raises(BadImage, match="too small: 65535 x 0 pixels"):
        crop(bytes(data))
