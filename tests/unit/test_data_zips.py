"""Zips of images, and classes from the names of files, give the crops that the same images give in a folder."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crops import crops_of
from image_diffusion.core.config.base import parse
from image_diffusion.data.sources import Source

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
LABELS = [3, 10, 7, 3, 10, 7, 3, 3, 3, 10, 7, 3]


def png(number: int) -> bytes:
    """Return a PNG as dataset_tool.py saves it."""
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(buffer, format="png", compress_level=0, optimize=False)
    return buffer.getvalue()


def write_zip(path: Path, members: dict[str, bytes | str]) -> dict[str, Any]:
    with zipfile.ZipFile(path, mode="w", compression=zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return {"type": "zip", "path": str(path)}


def as_edm2(labels: list[Any] | None) -> dict[str, bytes | str]:
    """Return the zip members that EDM2's `dataset_tool.py convert` writes."""
    images: dict[str, bytes | str] = {f"00000/img{number:08d}.png": png(number) for number in range(12)}
    return images | {"dataset.json": json.dumps({"labels": labels})}


WITH_CLASSES = {PIXELS[i].tobytes(): str(label) for i, label in enumerate(LABELS)}
WITHOUT = dict.fromkeys(WITH_CLASSES)


def test_edm2_zip_gives_its_images_and_labels(tmp_path: Path) -> None:
    labels = [[f"00000/img{number:08d}.png", label] for number, label in enumerate(LABELS)]
    source = write_zip(tmp_path / "a.zip", as_edm2(labels))
    assert crops_of(tmp_path / "one", source) == WITH_CLASSES
    assert crops_of(tmp_path / "two", source, processes=2) == WITH_CLASSES
    assert crops_of(tmp_path / "none", source | {"classes": "none"}) == WITHOUT
    parsed = parse(Source, source, "here")
    assert parsed.listing().classes == ["3", "7", "10"] and list(parsed.files()) == ["a.zip"]


def test_zip_without_labels_uses_folders_as_classes(tmp_path: Path) -> None:
    flat = write_zip(tmp_path / "flat.zip", {f"{number}.png": png(number) for number in range(12)})
    assert crops_of(tmp_path / "flat", flat) == WITHOUT
    folders = {f"{label}/{number}.png": png(number) for number, label in enumerate(LABELS)}
    made = write_zip(tmp_path / "folders.zip", {**folders, "stray.png": b"", "__MACOSX/3/0.png": b"", "3/.hidden": b""})
    assert crops_of(tmp_path / "folders", made) == WITH_CLASSES
    listing = parse(Source, made, "here").listing()
    assert listing.rejected == [("stray.png", "lies outside every class folder")] and len(listing.passed_over) == 2
    null = write_zip(tmp_path / "null.zip", as_edm2(None))
    assert set(crops_of(tmp_path / "null", null).values()) == {"00000"}


def test_edm2_folder_gives_its_images_and_labels(tmp_path: Path) -> None:
    """dataset_tool.py also writes these files into a folder."""
    labels = [[f"00000/img{number:08d}.png", label] for number, label in enumerate(LABELS)]
    for name, data in as_edm2(labels).items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data.encode() if isinstance(data, str) else data)
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "labels"}
    assert crops_of(tmp_path / "crops", source) == WITH_CLASSES
    (tmp_path / "in/00000/stray.png").write_bytes(png(0))
    listing = parse(Source, source, "here").listing()
    assert listing.rejected == [("00000/stray.png", "no class in dataset.json")]
    assert parse(Source, source, "here").known_classes() is None and listing.classes == ["3", "7", "10"]
    for content, message in (('{"labels": null}', "says that there are no classes"), ("[]", "cannot be read")):
        (tmp_path / "in/dataset.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            parse(Source, source, "here").listing()
    (tmp_path / "in/dataset.json").unlink()
    with pytest.raises(ValueError, match="data.source.classes is labels, but .*dataset.json does not exist"):
        parse(Source, source, "here").listing()


def test_files_without_label_and_labels_without_file_are_listed(tmp_path: Path) -> None:
    labels = [[f"00000/img{number:08d}.png", 1] for number in range(11)] + [["gone.png", 2]]
    listing = parse(Source, write_zip(tmp_path / "a.zip", as_edm2(labels)), "here").listing()
    assert len(listing.items) == 11 and listing.rejected == [
        ("00000/img00000011.png", "no class in dataset.json"),
        ("gone.png", "named in dataset.json, but not in the zip"),
    ]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds no files"),
        ({"a.png": b"", "dataset.json": "{}"}, "dataset.json cannot be read: 'labels'; it must hold"),
        ({"a.png": b"", "dataset.json": '{"labels": [["a.png", [0, 1]]]}'}, "dataset.json cannot be read"),
    ],
)
def test_unusable_zips_are_reported(tmp_path: Path, members: dict[str, bytes | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(Source, write_zip(tmp_path / "a.zip", members), "here").listing()


def test_damaged_zip_and_damaged_member_are_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="cannot be read as a zip file: File is not a zip file. Download"):
        parse(Source, {"type": "zip", "path": str(tmp_path / "bad.zip")}, "here").listing()
    with pytest.raises(ValueError, match="does not exist, or is no file"):
        parse(Source, {"type": "zip", "path": str(tmp_path / "gone.zip")}, "here").listing()
    source = write_zip(tmp_path / "a.zip", {"a.png": png(0), "b.png": png(1)})
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[100] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    parsed = parse(Source, source, "here")
    with pytest.raises(OSError, match="damaged in the zip: Bad CRC-32"):
        parsed.read(parsed.listing().items[0])


def test_damage_at_any_byte_of_a_compressed_member_is_reported(tmp_path: Path) -> None:
    """The decompressor raises errors of several types before there is a checksum to compare."""
    with zipfile.ZipFile(tmp_path / "a.zip", mode="w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b"one and two, " * 40)
        member = archive.infolist()[0]
    whole = (tmp_path / "a.zip").read_bytes()
    start, told = 30 + len(member.filename), 0
    for place in range(start, start + member.compress_size):
        path = tmp_path / f"{place}.zip"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        parsed = parse(Source, {"type": "zip", "path": str(path)}, "here")
        try:
            assert parsed.read(parsed.listing().items[0]) == b"one and two, " * 40, "bits that mean nothing"
        except OSError as error:
            assert str(error).startswith("damaged in the zip: ")
            told += 1
    assert told >= member.compress_size - 1


def write_named(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(number))


def test_classes_from_file_names_as_in_improved_diffusion(tmp_path: Path) -> None:
    names = [f"{'deep/er/' * (number % 2)}{label}_{number:05d}_x.png" for number, label in enumerate(LABELS)]
    write_named(tmp_path / "in", names)
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "names"}
    assert crops_of(tmp_path / "out", source) == WITH_CLASSES
    (tmp_path / "in/plain.png").write_bytes(png(0))
    listing = parse(Source, source, "here").listing()
    assert listing.rejected == [("plain.png", "no class in its name: no underscore")]


def test_classes_from_a_pattern(tmp_path: Path) -> None:
    write_named(tmp_path / "in", [f"day{number % 2}/shot-{label}-{number}.png" for number, label in enumerate(LABELS)])
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "names", "class_pattern": r"shot-(\d+)-"}
    assert crops_of(tmp_path / "out", source) == WITH_CLASSES
    assert parse(Source, source | {"class_pattern": "^(day.)/"}, "here").listing().classes == ["day0", "day1"]
    for wrong, message in (("(", "not a regular expression"), ("a", "one group"), ("(a)(b)", "one group")):
        with pytest.raises(ValueError, match=message):
            parse(Source, source | {"class_pattern": wrong}, "here")
    with pytest.raises(ValueError, match="only used with classes: names"):
        parse(Source, source | {"classes": "folders"}, "here")
