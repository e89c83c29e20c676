"""Colour profiles of images: counted, ignored by default, and applied on request."""

import io
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from image_diffusion.core.config.base import to_yaml
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.image import Crop, crop_image, quiet_pillow
from image_diffusion.stages import crop
from image_diffusion.stages.datasheet import write_datasheet

GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (16, 16, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)


def fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


@cache
def profile(gamma: float, is_wide: bool = False, space: str = "RGB ") -> bytes:
    """Return an ICC profile (version 2.1) of a gamma and the primaries of sRGB or Adobe RGB, or of grey."""

    def xyz(*values: float) -> bytes:
        return b"XYZ " + bytes(4) + b"".join(map(fixed, values))

    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    srgb = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
    adobe = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))
    tags = {b"wtpt": xyz(0.9642, 1.0, 0.8249)}
    if space == "GRAY":
        tags[b"kTRC"] = curve
    else:
        primaries = zip((b"rXYZ", b"gXYZ", b"bXYZ"), adobe if is_wide else srgb, strict=True)
        tags |= {name: xyz(*value) for name, value in primaries}
        tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    at, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        table += name + struct.pack(">II", at + len(body), len(value))
        body += value
    size = at + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02100000, b"mntr", space.encode(), b"XYZ ")
    head = head.ljust(36, b"\0") + b"acsp" + bytes(28) + fixed(0.9642) + fixed(1.0) + fixed(0.8249)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ADOBE = profile(2.2, is_wide=True)


def encoded(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def cropped(data: bytes, **changes: Any) -> Crop:
    with quiet_pillow():
        return crop_image(
            data, DataConfig.model_validate({"name": "x", "source": {"type": "digits"}, "resolution": 16} | changes)
        )


def converted(image: Image.Image, icc: bytes) -> np.ndarray:
    source, goal = ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB")
    intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    result = ImageCms.profileToProfile(image, source, goal, renderingIntent=intent, outputMode="RGB", flags=flags)
    assert result is not None
    return np.asarray(result).transpose(2, 0, 1)


@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
def test_other_profiles_are_flagged_and_applied_on_request(kind: str) -> None:
    data = encoded(RGB, kind, icc_profile=ADOBE, **({"lossless": True} if kind == "webp" else {}))
    plain = cropped(data)
    assert plain.flags == ["profile"] and (plain.crops[0] == PIXELS.transpose(2, 0, 1)).all()
    applied = cropped(data, profile="convert")
    assert applied.flags == ["profile"] and (applied.crops[0] == converted(RGB, ADOBE)).all()
    assert np.abs(applied.crops[0].astype(int) - plain.crops[0]).max() > 20


def test_jpeg_profiles_are_flagged_and_applied_on_request() -> None:
    data = encoded(RGB, "jpeg", icc_profile=ADOBE)
    assert cropped(data).flags == ["profile"]
    same = cropped(encoded(RGB, "jpeg"))
    assert (cropped(data).crops[0] == same.crops[0]).all()
    assert np.abs(cropped(data, profile="convert").crops[0].astype(int) - same.crops[0]).max() > 10


@pytest.mark.parametrize("icc", [SRGB, b"", b"no profile at all", ADOBE[:200], profile(2.2, space="GRAY")])
@pytest.mark.parametrize("choice", ["ignore", "convert"])
def test_srgb_and_unusable_profiles_change_nothing(icc: bytes, choice: str) -> None:
    found = cropped(encoded(RGB, icc_profile=icc), profile=choice)
    assert found.flags == [] and (found.crops[0] == PIXELS.transpose(2, 0, 1)).all()


def test_grey_profile_of_another_gamma_is_applied() -> None:
    data = encoded(RGB.convert("L"), icc_profile=profile(1.0, space="GRAY"))
    assert cropped(data).flags == ["gray", "profile"]
    plain, applied = (cropped(data, channels=1, profile=choice).crops[0] for choice in ("ignore", "convert"))
    dark = (plain > 20) & (plain < 100)
    assert (applied[dark] > plain[dark] + 20).all()


def test_profile_conversion_keeps_transparency() -> None:
    image = RGB.copy()
    image.putalpha(Image.fromarray(PIXELS[..., 0]))
    found = cropped(encoded(image, icc_profile=ADOBE), channels=4, profile="convert").crops[0]
    assert (found[3] == PIXELS[..., 0]).all() and (found[:3] == converted(RGB, ADOBE)).all()


def test_stage_and_data_sheet_count_other_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        icc = ADOBE if number < 3 else SRGB
        (tmp_path / f"in/{number}.png").write_bytes(encoded(RGB.rotate(90 * number), icc_profile=icc))
    data = {"name": "x", "source": {"type": "folder", "path": str(tmp_path / "in")}, "resolution": 16, "num_shards": 1}
    (tmp_path / "data.yaml").write_text(to_yaml(data))
    output = tmp_path / "crops/manifest.json"
    arguments = ["crop", "--config", str(tmp_path / "data.yaml"), "--output", str(output)]
    monkeypatch.setattr("sys.argv", arguments)
    crop.main()
    assert "crop: 3 crops are of images whose colour profile is not sRGB" in capsys.readouterr().out
    sheet = write_datasheet(output.parent, tmp_path / "sheet", None)
    assert {each["kind"]: each["count"] for each in sheet["findings"] if each["kind"] == "profile"} == {"profile": 3}
    (tmp_path / "data.yaml").write_text(to_yaml(data | {"profile": "convert"}))
    crop.main()
    assert "profile" not in capsys.readouterr().out
