"""More than forty kinds of odd and bad files: each gives the documented crop, or is listed with a reason."""

import csv
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.records import read_record

GENERATOR = np.random.default_rng(0)
PIXELS = np.asarray(
    Image.fromarray(GENERATOR.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((48, 40), Image.Resampling.BICUBIC)
)
RGB = Image.fromarray(PIXELS)
ALPHA = Image.fromarray(np.where(np.arange(48)[None] < 24, 255, 0).astype(np.uint8).repeat(40, 0))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def config(**changes: Any) -> DataConfig:
    values = {"name": "x", "source": {"type": "digits"}, "resolution": 16, "pages": "first"}
    return DataConfig.model_validate(values | changes)


def crop(data: bytes, **changes: Any) -> tuple[np.ndarray, list[str]]:
    with quiet_pillow():
        found = crop_image(data, config(**changes))
    return found.crops[0].transpose(1, 2, 0), found.flags


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(RGB, "png", exif=exif)


def grey16(dtype: str = "<u2") -> Image.Image:
    return Image.fromarray((np.linspace(0, 65535, 48 * 40).reshape(40, 48)).astype(dtype))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(data, 9)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def rgb16_png() -> bytes:
    rows = (PIXELS.astype(">u2") * 257).reshape(40, -1)
    return png_of_size(48, 40, b"".join(b"\0" + row.tobytes() for row in rows), depth=16)


def animated(kind: str) -> bytes:
    other = Image.new("RGB", RGB.size, "red")
    return encoded(RGB, kind, save_all=True, append_images=[other], **({"lossless": True} if kind == "webp" else {}))


EXACT = crop(encoded(RGB, "png"))[0]
GREY = crop(encoded(RGB.convert("L"), "png"))[0]

# Files that give exactly the pixels of a plain RGB or grey PNG: name, bytes, flags.
SAME_AS_RGB: dict[str, tuple[bytes, list[str]]] = {
    "bmp": (encoded(RGB, "bmp"), []),
    "tiff": (encoded(RGB, "tiff"), []),
    "ppm": (encoded(RGB, "ppm"), []),
    "tga": (encoded(RGB, "tga"), []),
    "webp lossless": (encoded(RGB, "webp", lossless=True), []),
    "jpeg 2000 lossless": (encoded(RGB, "jpeg2000"), []),
    "interlaced options": (encoded(RGB, "png", compress_level=0), []),
    "animated webp": (animated("webp"), ["first_frame"]),
    "animated png": (animated("png"), ["first_frame"]),
    "tiff of two pages": (animated("tiff"), ["first_frame"]),
    "rgba, opaque": (encoded(RGB.convert("RGBA"), "png"), ["alpha"]),
    "16-bit rgb png": (rgb16_png(), ["16bit"]),
    "data behind the end": (encoded(RGB, "png") + b"rubbish", []),
    "rgb png with unused transparent colour": (encoded(RGB, "png", transparency=(1, 2, 3)), ["alpha"]),
}
SAME_AS_GREY: dict[str, tuple[bytes, list[str]]] = {
    "grey png": (encoded(RGB.convert("L"), "png"), ["gray"]),
    "grey and alpha, opaque": (encoded(RGB.convert("L").convert("LA"), "png"), ["alpha", "gray"]),
    "grey tiff": (encoded(RGB.convert("L"), "tiff"), ["gray"]),
    "pgm": (encoded(RGB.convert("L"), "ppm"), ["gray"]),
    "grey gif": (encoded(RGB.convert("L"), "gif"), ["palette"]),
}
# Files that give a crop with these flags; separate tests check their pixels, or they are not exactly known.
CROPPED: dict[str, tuple[bytes, list[str]]] = {
    "jpeg": (encoded(RGB, "jpeg"), []),
    "progressive jpeg": (encoded(RGB, "jpeg", progressive=True), []),
    "grey jpeg": (encoded(RGB.convert("L"), "jpeg"), ["gray"]),
    "cmyk jpeg": (encoded(RGB.convert("CMYK"), "jpeg"), ["cmyk"]),
    "cmyk tiff": (encoded(RGB.convert("CMYK"), "tiff"), ["cmyk"]),
    "ycbcr tiff": (encoded(RGB.convert("YCbCr"), "tiff"), ["colour_space"]),
    "black and white": (encoded(RGB.convert("1"), "png"), ["gray"]),
    "palette": (encoded(RGB.quantize(16), "png"), ["palette"]),
    "palette with transparency": (encoded(RGB.quantize(16), "png", transparency=0), ["alpha", "palette"]),
    "gif": (encoded(RGB.quantize(16), "gif"), ["palette"]),
    "half transparent": (encoded(Image.merge("RGBA", (*RGB.split(), ALPHA)), "png"), ["alpha"]),
    "ico": (encoded(RGB, "ico", sizes=[(32, 32)]), []),
    "avif": (encoded(RGB, "avif"), []),
    "jpeg of two pictures": (encoded(RGB, "mpo", save_all=True, append_images=[RGB]), ["first_frame"]),
    "16-bit grey png": (encoded(grey16(), "png"), ["16bit", "gray"]),
    "16-bit grey tiff": (encoded(grey16(), "tiff"), ["16bit", "gray"]),
    "16-bit big-endian tiff": (
        encoded(Image.frombytes("I;16B", (48, 40), bytes(48 * 40 * 2)), "tiff"),
        ["16bit", "gray"],
    ),
    "one pixel": (encoded(RGB.resize((1, 1)), "png"), []),
    "20 x 400": (encoded(RGB.resize((20, 400)), "png"), []),
    "stored turned": (turned(6), ["exif"]),
    "stored mirrored": (turned(2), ["exif"]),
    "an orientation that does not exist": (turned(9), []),
}
JPEG = encoded(RGB, "jpeg")
# Files that give no crop: bytes and the start of the reason.
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "text": (b"not an image at all", "not an image"),
    "html": (b"<!DOCTYPE html><html></html>", "not an image"),
    "pdf": (b"%PDF-1.4 " + bytes(100), "not an image"),
    "eps, which would run another program": (encoded(RGB, "eps"), r"a format that is not read \(EPS\)"),
    "two bytes of a jpeg": (JPEG[:2], "not an image"),
    "a jpeg's header": (JPEG[:24], "damaged"),
    "dds": (encoded(RGB, "dds"), r"a format that is not read \(DDS\); known: JPEG, PNG, "),
    "pcx": (encoded(RGB, "pcx"), r"a format that is not read \(PCX\); known: JPEG, PNG, "),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "damaged"),
    "half a png": (encoded(RGB, "png")[:200], "damaged"),
    "half a webp": (encoded(RGB, "webp")[:100], "damaged"),
    "half a gif": (encoded(RGB.quantize(16), "gif")[:-200], "damaged"),
    "half a tiff": (encoded(RGB, "tiff")[:200], "damaged"),
    "a png with a flipped bit": (encoded(RGB, "png")[:60] + b"\xff" + encoded(RGB, "png")[61:], "damaged"),
    "zeros": (bytes(1000), "not an image"),
    "photograph of a phone": (b"\0\0\0\x18ftypheic" + bytes(100), r"a format that is not read \(HEIC\); known: JPEG"),
    "32-bit float tiff": (encoded(Image.fromarray(np.ones((40, 48), np.float32)), "tiff"), "32-bit floating-point"),
    "32-bit integer tiff": (encoded(Image.fromarray(np.ones((40, 48), np.int32)), "tiff"), "32-bit integer"),
    "a bomb of 50,000 x 50,000 pixels": (png_of_size(50_000, 50_000, bytes(10_000_000)), "too large: 50000 x 50000"),
    "a bomb whose header lies": (png_of_size(2**31 - 1, 2**31 - 1), "too large"),
    "a line of 600,000 pixels": (encoded(Image.new("L", (1, 600_000)), "png"), "too thin"),
    "no pixels": (png_of_size(0, 0), "not an image"),
}  # fmt: skip


def test_there_are_at_least_forty_kinds() -> None:
    assert len(SAME_AS_RGB) + len(SAME_AS_GREY) + len(CROPPED) + len(BAD) >= 60


@pytest.mark.parametrize("kind", SAME_AS_RGB)
def test_files_give_the_pixels_of_the_same_rgb_image(kind: str) -> None:
    data, flags = SAME_AS_RGB[kind]
    pixels, found = crop(data)
    assert found == flags
    assert (pixels == EXACT).all()


@pytest.mark.parametrize("kind", SAME_AS_GREY)
def test_files_give_the_pixels_of_the_same_grey_image(kind: str) -> None:
    data, flags = SAME_AS_GREY[kind]
    pixels, found = crop(data)
    assert found == flags
    assert (pixels == GREY).all()
    assert (crop(data, channels=1)[0] == GREY[:, :, :1]).all()


@pytest.mark.parametrize("kind", CROPPED)
def test_odd_files_give_a_crop_with_flags(kind: str) -> None:
    data, flags = CROPPED[kind]
    pixels, found = crop(data)
    assert found == flags
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_give_a_reason_instead_of_a_crop(kind: str) -> None:
    data, reason = BAD[kind]
    with pytest.raises(BadImage, match=f"^{reason}"):
        crop(data, resolution=32 if "jpeg" in kind else 16)


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff"])
def test_exif_orientation_is_applied_exactly_once(orientation: int, kind: str) -> None:
    undo: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, -1),
        7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        8: lambda x: np.rot90(x, 1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(RGB, kind, exif=exif)
    stored = np.asarray(Image.open(io.BytesIO(encoded(RGB, kind))))
    expected = crop(encoded(Image.fromarray(np.ascontiguousarray(undo[orientation](stored))), "png"))[0]
    pixels, flags = crop(data)
    assert flags == ["exif"]
    assert (pixels == expected).all()


def test_16_bits_are_scaled_to_8_not_clipped() -> None:
    values = grey16()
    expected = Image.fromarray((np.asarray(values) / 257.0).round().astype(np.uint8))
    pixels, _ = crop(encoded(values, "png"))
    assert (pixels == crop(encoded(expected, "png"))[0]).all()
    pgm = b"P5 48 40 65535\n" + np.asarray(values).astype(">u2").tobytes()
    assert (crop(pgm)[0] == pixels).all()


def test_transparency_shows_the_background() -> None:
    wide = RGB.resize((120, 40))
    opacity = Image.new("L", wide.size, 0)
    clear = Image.merge("RGBA", (*wide.split(), opacity))
    assert (crop(encoded(clear, "png"), channels=4)[0][:, :, 3] == 0).all()
    opacity.putpixel((0, 0), 255)  # the crop cuts it off
    clear = Image.merge("RGBA", (*wide.split(), opacity))
    assert (crop(encoded(clear, "png"))[0] == 255).all()
    assert (crop(encoded(clear, "png"), background=(10, 20, 30))[0] == (10, 20, 30)).all()
    coloured = Image.new("P", (40, 20), 3)
    coloured.putpixel((0, 0), 1)
    coloured.putpalette(list(range(30)))
    palette = encoded(coloured, "png", transparency=3)
    assert (crop(palette, background=(1, 2, 3))[0] == (1, 2, 3)).all()


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_crops_have_the_configured_number_of_channels(channels: int, mode: str) -> None:
    pixels, _ = crop(encoded(RGB, "png"), channels=channels)
    assert pixels.shape == (16, 16, channels)
    expected = np.asarray(Image.fromarray(EXACT).convert(mode)).reshape(16, 16, channels)
    assert np.abs(pixels.astype(int) - expected).max() <= 3


def test_small_images_are_quarantined_on_request() -> None:
    with pytest.raises(BadImage, match=r"^too small: 48 x 40 pixels, less than min_side = 41"):
        crop(encoded(RGB, "png"), min_side=41)
    assert crop(encoded(RGB, "png"), min_side=40)[0].shape == (16, 16, 3)


def test_folder_of_all_kinds_loses_no_file(tmp_path: Path) -> None:
    good = {**SAME_AS_RGB, **SAME_AS_GREY, **CROPPED}
    names = {}
    for number, (kind, (data, flags)) in enumerate(good.items()):
        name = f"class {number % 3}/{'deeper/' * (number % 2)}{number}.v1.é\n{'.jpg' * (number % 3)}"
        names[name] = (kind, flags)
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    for number, (data, _) in enumerate(BAD.values()):
        (tmp_path / "in" / "class 0" / f"bad {number}.png").write_bytes(data)
    hidden = [".x.jpg", "._x.jpg", ".git/x.jpg", "Thumbs.db"]
    for name in hidden:
        (tmp_path / "in" / "class 1" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / "class 1" / name).write_bytes(JPEG)
    (tmp_path / "in/readme.txt").write_text("outside every class")
    (tmp_path / "in/class 2/nowhere.jpg").symlink_to(tmp_path / "missing.jpg")
    (tmp_path / "in/class 2/again").symlink_to(tmp_path / "in/class 2")
    (tmp_path / "elsewhere.png").write_bytes(encoded(RGB, "png"))
    (tmp_path / "in/class 2/linked.png").symlink_to(tmp_path / "elsewhere.png")
    os.mkfifo(tmp_path / "in/class 2/pipe.jpg")
    (tmp_path / os.fsdecode(b"in/class 2/bytes \xff.png")).write_bytes(encoded(RGB, "png"))
    settings = DataConfig(
        name="x",
        source={"type": "folder", "path": str(tmp_path / "in")},  # type: ignore[arg-type]
        resolution=16,
        num_shards=3,
        max_bad_fraction=0.5,
        pages="first",
        range="file",
    )
    manifest = crop_dataset(settings, tmp_path / "out").manifest
    samples = {each.path: each for shard in range(3) for each in read_record(tmp_path / "out", shard).samples}
    assert samples.keys() == {*names, "class 2/linked.png", "class 2/bytes \\xff.png"}
    for name, (_, flags) in names.items():
        assert samples[name].flags == flags
        assert samples[name].label == int(name[6])
        assert "." not in samples[name].key
    with (tmp_path / "out/quarantine.csv").open(newline="") as file:
        quarantine = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    for number, (_, reason) in enumerate(BAD.values()):
        assert quarantine.pop(f"class 0/bad {number}.png").startswith(reason.replace("\\", ""))
    assert quarantine == {
        "readme.txt": "lies outside every class folder",
        "class 2/nowhere.jpg": "a link to nothing",
        "class 2/again": "a link to a folder that holds it",
        "class 2/pipe.jpg": "neither a file nor a folder",
    }
    assert manifest["quarantined"] == len(BAD) + 4
    assert manifest["ignored"] == len(hidden)
    assert manifest["num_samples"] == len(good) + 2
    assert manifest["classes"] == ["class 0", "class 1", "class 2"]


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def behind_the_pixels(data: bytes, chunk: bytes) -> bytes:
    return data[:-12] + chunk + data[-12:]


def before_the_pixels(data: bytes, chunk: bytes) -> bytes:
    return data[:33] + chunk + data[33:]  # signature and IHDR


def said_to_be_turned(kind: str) -> bytes:
    """Return the image with orientation 6 in a place that only Pillow's `exif_transpose` reads."""
    png, exif = encoded(RGB, "png"), Image.Exif()
    exif[0x0112] = 6
    raw = exif.tobytes()
    text = f"\nexif\n{len(raw)}\n{raw.hex()}\n".encode()
    international = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)
    return {
        "jpeg, xmp": lambda: encoded(RGB, "jpeg", xmp=XMP),
        "webp, xmp": lambda: encoded(RGB, "webp", xmp=XMP, lossless=True),
        "png, xmp": lambda: before_the_pixels(png, international),
        "avif, xmp": lambda: encoded(RGB, "avif", xmp=XMP),
        "png, late exif": lambda: behind_the_pixels(png, png_chunk(b"eXIf", raw[6:])),
        "png, of ImageMagick": lambda: before_the_pixels(
            png, png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))
        ),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["jpeg, xmp", "webp, xmp", "png, xmp", "avif, xmp", "png, late exif", "png, of ImageMagick"]
)
def test_orientation_outside_of_exif_is_applied(kind: str) -> None:
    data = said_to_be_turned(kind)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        stored = np.asarray(image.convert("RGB"))
    pixels, flags = crop(data)
    assert flags == ["exif"]
    expected = crop(encoded(Image.fromarray(np.ascontiguousarray(np.rot90(stored, -1))), "png"))[0]
    assert (pixels == expected).all()
