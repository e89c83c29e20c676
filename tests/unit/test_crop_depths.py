"""Images of more than 8 bits: the file states black and white, or the stage stops."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.image import Crop, crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.records import read_record

SIDE = 16
RAMP = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
LEVELS = np.rint(RAMP * 255).astype(int)
"""Expected crop of a ramp from black to white."""


def tiff(pixels: np.ndarray, bits: int = 16, photometric: int = 1, order: str = "<", **tags: Any) -> bytes:
    """Return a TIFF of one uncompressed strip, [H, W] or [H, W, 3]; further tags are given as t281=4095."""
    height, width, *channels = pixels.shape
    samples = channels[0] if channels else 1
    if bits == 12:
        pairs = pixels.reshape(-1, 2).astype(int)
        packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], 1)
        body = packed.astype(np.uint8).tobytes()
    else:
        body = pixels.astype(f"{order}{pixels.dtype.kind}{bits // 8}").tobytes()
    entries = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: samples, 278: height}
    entries |= {279: len(body)} | {int(name[1:]): value for name, value in tags.items()}
    extra, lines = b"", b""
    start = 8 + len(body) + 2 + 12 * len(entries) + 4
    for tag, value in sorted(entries.items()):
        count, kind = (samples, "H") if tag == 258 else (1, "I")
        field = struct.pack(f"{order}{count}{kind}", *[value] * count)
        if len(field) > 4:
            extra, field = extra + field, struct.pack(f"{order}I", start + len(extra))
        lines += struct.pack(f"{order}HHI", tag, 3 if kind == "H" else 4, count) + field.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(body))
    return head + body + struct.pack(f"{order}H", len(entries)) + lines + bytes(4) + extra


def ramp(most: int, least: int = 0) -> np.ndarray:
    return np.rint(least + RAMP * (most - least)).astype(np.uint16)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def config(**changes: Any) -> DataConfig:
    values = {"name": "x", "source": {"type": "digits"}, "resolution": SIDE, "channels": 1, "num_shards": 1}
    return DataConfig.model_validate(values | changes)


def crop(data: bytes, **changes: Any) -> Crop:
    with quiet_pillow():
        return crop_image(data, config(**changes))


def of_set(folder: Path, files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    (folder / "in").mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / "in" / name).write_bytes(data)
    settings = config(source={"type": "folder", "path": str(folder / "in")}, max_bad_fraction=0.0, **changes)
    return crop_dataset(settings, folder / "out").manifest


def pgm(most: int) -> bytes:
    return f"P5 {SIDE} {SIDE} {most}\n".encode() + ramp(most).astype(">u2").tobytes()


# Files that state their own range, each with a ramp from black to white.
STATED = {
    "12 bits": tiff(ramp(4095), 12),
    "16 bits": tiff(ramp(65535)),
    "16 bits, big-endian": tiff(ramp(65535), order=">"),
    "16 bits, white is 0": tiff(65535 - ramp(65535), photometric=0),
    "12 bits in 16": tiff(ramp(4095), t281=4095),
    "10 bits in 16, by the other tag": tiff(ramp(1023), t341=1023),
    "14 bits in 16, white is 0": tiff(16383 - ramp(16383), photometric=0, t281=16383),
    "a greatest value that is none": tiff(ramp(65535), t281=12345),
    "pgm of 10 bits": pgm(1023),
    "pgm of 12 bits": pgm(4095),
    "pgm of 16 bits": pgm(65535),
    "png": png(ramp(65535)),
}


@pytest.mark.parametrize("kind", STATED)
def test_a_ramp_goes_from_black_to_white(kind: str) -> None:
    found = crop(STATED[kind])
    assert np.abs(found.crops[0][0].astype(int) - LEVELS).max() <= 1
    assert found.flags == ["16bit", "gray"]


@pytest.mark.parametrize("most", [4095, 1023])
def test_full_range_is_kept_byte_for_byte(most: int) -> None:
    values = ramp(65535).astype(int)
    expected = ((values * 255 + 32767) // 65535).astype(np.uint8)
    assert (crop(png(ramp(65535))).crops[0][0] == expected).all()
    assert (crop(tiff(ramp(65535))).crops[0][0] == expected).all()
    assert len(np.unique(crop(tiff(ramp(most), t281=most)).crops[0])) == 256


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (tiff(ramp(1300, 100)), [100, 1300]),
        (tiff(1400 - ramp(1300, 100), photometric=0), [100, 1300]),
        (tiff(ramp(4095), t281=4095), [0, 4095]),
        (pgm(4095), [0, 4095]),
        (tiff(np.rint(RAMP * 1400 - 1000).astype(np.int16), t339=2), [-1000, 400]),
        (tiff(RAMP.astype(np.float32) * 11 - 5.5, 32, t339=3), [-5.5, 5.5]),
    ],
    ids=["uint16", "white is 0", "tag", "pgm", "int16", "float32"],
)
def test_configured_range_maps_to_black_and_white(pixels: bytes, said: list[float]) -> None:
    assert np.abs(crop(pixels, range=said).crops[0][0].astype(int) - LEVELS).max() <= 1


def test_values_outside_the_range_are_clipped_and_8_bit_images_unchanged() -> None:
    levels = crop(tiff(ramp(65535)), range=[20000, 40000]).crops[0][0]
    assert (levels.min(), levels.max()) == (0, 255) and (levels == 0).mean() > 0.3 < (levels == 255).mean()
    grey = LEVELS.astype(np.uint8)
    assert (crop(png(grey), range=[0, 4095]).crops[0][0] == grey).all()


def test_non_finite_values_give_no_crop() -> None:
    pixels = np.where(RAMP > 0.5, np.nan, RAMP).astype(np.float32)
    with pytest.raises(BadImage, match="not finite"):
        crop(tiff(pixels, 32, t339=3), range=[0, 1])


@pytest.mark.parametrize("kind", ["tiff", "png", "colour"])
def test_images_that_use_little_of_the_16_bit_range_stop_the_stage(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = ramp(1300, 100)
    files = {"tiff": tiff(pixels), "png": png(pixels), "colour": tiff(np.stack([pixels] * 3, -1), photometric=2)}
    used = "0 to 1,535" if kind == "colour" else "100 to 1,300"
    advice = "Convert them to 8 bits, or set" if kind == "colour" else r"for example \[0, 2047\], or to file"
    names = {f"{number}.x": files[kind] for number in range(3)}
    start = f"^3 of 3 images have 16 bits and use values {used} of 65,535\\. "
    with pytest.raises(ValueError, match=f"{start}.*{advice}.*$") as stop:
        of_set(tmp_path, names, channels=3)
    assert "data.range" in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "out/manifest.json").exists()
    capsys.readouterr()
    assert of_set(tmp_path, names, channels=3, range="file")["flags"]["16bit"] == 3
    assert f"use values {used} of 65,535, which data.range: file makes dark." in capsys.readouterr().err
    if kind == "colour":
        with pytest.raises(ValueError, match="colour of 16 bits"):
            of_set(tmp_path, names, channels=3, range=[0, 2047])
    else:
        assert of_set(tmp_path, names, channels=3, range=[0, 2047])["crop"]["range"] == [0, 2047]


def test_few_hot_pixels_do_not_count_as_full_range(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(100, 1300, (64, 64)).astype(np.uint16)
    pixels[3, 4] = 65535
    with pytest.raises(ValueError, match=r"values 100 to 1,299 \(and 0.1 % of the pixels up to 65,535\)"):
        of_set(tmp_path, {"a.tif": tiff(pixels)})


def test_one_bright_image_of_a_set_shows_its_range(tmp_path: Path) -> None:
    files = {"dark.png": png(ramp(1300)), "bright.png": png(ramp(60000))}
    assert "range" not in of_set(tmp_path, files)["crop"]


def test_mixed_depths_stop_the_stage(tmp_path: Path) -> None:
    files = {"a.png": png(ramp(65535)), "b.png": png(LEVELS.astype(np.uint8)), "c.pgm": pgm(4095)}
    with pytest.raises(ValueError, match="1 of 3 images have 16 bits, values 0 to 65,5.* Set data.range to file"):
        of_set(tmp_path, files)
    manifest = of_set(tmp_path, files, range="file")
    assert manifest["flags"] == {"16bit": 2, "gray": 3}
    levels = [each.brightness for each in read_record(tmp_path / "out", 0).samples]
    assert max(levels) - min(levels) < 0.5
    del files["a.png"]
    (tmp_path / "in/a.png").unlink()
    of_set(tmp_path, files)  # a PGM states its range


def test_empty_range_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"\[5\.0, 5\.0\] is not a range"):
        config(range=[5, 5])


def pages(*images: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    images[0].save(buffer, "tiff", save_all=True, append_images=images[1:], **options)
    return buffer.getvalue()


def test_several_pages_stop_the_stage(tmp_path: Path) -> None:
    image = Image.fromarray(LEVELS.astype(np.uint8))
    data = pages(*[image] * 5)
    with pytest.raises(Undecided, match="holds 5 pages. Set data.pages to first"):
        crop(data)
    with pytest.raises(ValueError, match=r"^b.tif: the file holds 5 pages"):
        of_set(tmp_path, {"a.png": png(LEVELS.astype(np.uint8)), "b.tif": data})
    assert not list((tmp_path / "out").glob("*.tar"))
    assert of_set(tmp_path, {}, pages="first")["crop"]["pages"] == "first"


def test_reduced_resolution_copies_are_not_counted_as_pages() -> None:
    small = Image.fromarray(LEVELS.astype(np.uint8)).resize((8, 8))
    small.encoderinfo = {"tiffinfo": {254: 1}}  # type: ignore[attr-defined]
    found = crop(pages(Image.fromarray(LEVELS.astype(np.uint8)), small))
    assert found.flags == ["gray"] and (found.crops[0][0] == LEVELS).all()


@pytest.mark.parametrize(("mode", "width"), [("RGB", 720), ("RGB", 540), ("RGB", 54), ("L", 160), ("1", 128)])
def test_wide_bmp_is_not_flagged_as_16_bit(mode: str, width: int) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (width, 20)).save(buffer, "bmp")
    assert "16bit" not in crop(buffer.getvalue()).flags


def test_16_bit_per_pixel_bmp_is_not_flagged_as_16_bit() -> None:
    head = struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 16, 0, SIDE * SIDE * 2, 0, 0, 0, 0)
    data = b"BM" + struct.pack("<IHHI", 54 + SIDE * SIDE * 2, 0, 0, 54) + head + b"\x55\x2a" * SIDE * SIDE
    assert crop(data).flags == []


def tga(opacity_bits: int, opacity: int) -> bytes:
    head = struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, SIDE, SIDE, 32, 0x20 | opacity_bits)
    pixels = np.concatenate([LEVELS[..., None].repeat(3, -1), np.full((SIDE, SIDE, 1), opacity)], -1)
    return head + pixels.astype(np.uint8).tobytes()


def test_unused_fourth_tga_byte_is_not_treated_as_alpha() -> None:
    found = crop(tga(0, 0))
    assert (found.crops[0][0] == LEVELS).all() and "alpha" not in found.flags
    assert (crop(tga(8, 255)).crops[0][0] == LEVELS).all()


@pytest.mark.parametrize("background", [None, (1, 2, 3)])
def test_fully_transparent_images_give_no_crop(background: tuple[int, int, int] | None) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (SIDE, SIDE), (200, 0, 0, 0)).save(buffer, "png")
    for data in (tga(8, 0), buffer.getvalue()):
        with pytest.raises(BadImage, match="^nothing is visible: every pixel is transparent"):
            crop(data, background=background)
