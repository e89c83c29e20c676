"""Data sheets report every planted defect, and none in a clean data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.quality.datasheet import body, summary
from image_diffusion.stages.datasheet import captions_of, write_datasheet
from photographs import CHANGES, tiles

PHOTOGRAPHS = tiles()


def fill(folder: Path) -> None:
    for number, image in enumerate(PHOTOGRAPHS):
        path = folder / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        path.with_suffix(".txt").write_text(f"photograph number {number}")


def sheet_of(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    values = {"name": "x", "source": {"type": "folder", "path": str(folder)}, "resolution": 64, "num_shards": 4}
    config = DataConfig.model_validate(values | changes)
    crop_dataset(config, output / "crops")
    return write_datasheet(output / "crops", output / "datasheet", captions_of(config))


def test_names_from_the_data_are_escaped_in_the_summary() -> None:
    manifest = {"name": "x", "num_samples": 2, "shape": [1], "classes": ["<b>|", "[a](b)"], "histogram": [1, 1]}
    assert "| Classes | &lt;b&gt;\\| (1), \\[a](b) (1) |" in summary(manifest, {})


def found(sheet: dict[str, Any]) -> dict[str, int]:
    return {each["kind"]: each["count"] for each in sheet["findings"]}


def test_clean_set_has_no_findings(tmp_path: Path) -> None:
    fill(tmp_path / "in")
    sheet = sheet_of(tmp_path / "in", tmp_path / "out", validation_fraction=0.2)
    assert sheet["findings"] == [] and sheet["groups"] == [] and sheet["moved"] == 0
    assert sheet["formats"] == {"PNG": len(PHOTOGRAPHS)} and sheet["modes"] == {"RGB": len(PHOTOGRAPHS)}
    assert sheet["measures"]["width"] == [106.0] * 5 and sheet["measures"]["share cut away"] == [0.0] * 5
    assert sheet["captions"]["captions"] == len(PHOTOGRAPHS) == sheet["captions"]["different"]
    assert len(sheet["strange"]) == min(50, len(PHOTOGRAPHS))
    page = (tmp_path / "out/datasheet/index.html").read_text()
    assert (
        "Nothing stands out." in page and "strange.png" in page and not (tmp_path / "out/datasheet/same.png").exists()
    )


def copy_of(number: int, change: str = "", label: str = "") -> Callable[[Path], object]:
    """Return a function that saves a changed copy of a photograph, in its own class or in another."""
    image = PHOTOGRAPHS[number]
    return lambda folder: (CHANGES[change](image) if change else image).save(
        folder / (label or "ab"[number % 2]) / f"copy of {number:02d}.png"
    )


def saved(name: str, image: Image.Image) -> Callable[[Path], object]:
    return lambda folder: image.save(folder / "a" / name)


def noisy(side: tuple[int, int], middle: int, spread: int) -> Image.Image:
    return Image.effect_noise(side, spread).point(lambda value: value - 128 + middle).convert("RGB")


DEFECTS: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "a copy": (copy_of(2), {"duplicate": 1}),
    "a copy in another class": (copy_of(3, label="a"), {"duplicate": 1, "label conflict": 1}),
    "saved again": (copy_of(4, "jpeg"), {"near duplicate": 1}),
    "resized": (copy_of(5, "resized"), {"near duplicate": 1}),
    "trimmed": (copy_of(6, "trimmed"), {"near duplicate": 1}),
    "mirrored, in another class": (copy_of(7, "mirrored", "a"), {"near duplicate": 1, "label conflict": 1}),
    "one colour": (saved("blue.png", Image.new("RGB", (106, 106), (20, 40, 200))), {"plain": 1}),
    "nearly black": (saved("black.png", PHOTOGRAPHS[3].rotate(90).point(lambda value: value * 0.12)), {"dark": 1}),
    "blurred": (saved("soft.png", Image.linear_gradient("L").convert("RGB")), {"blurred": 1}),
    "tiny": (saved("tiny.png", PHOTOGRAPHS[8].crop((0, 0, 24, 24))), {"enlarged": 1}),
    "a banner": (saved("banner.png", noisy((400, 100), 128, 90)), {"cut": 1}),
    "no image": (lambda folder: (folder / "a/letter.png").write_bytes(b"Dear"), {"unreadable": 1}),
    "another colour mode": (saved("print.jpg", PHOTOGRAPHS[0].crop((20, 20, 90, 90)).convert("CMYK")), {"cmyk": 1}),
    "captions repeated": (
        lambda folder: [path.write_text("a photo") for path in sorted((folder / "b").glob("*.txt"))[:5]],
        {"repeated caption": 1},
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_one_defect_is_found_and_nothing_else(tmp_path: Path, defect: str) -> None:
    plant, expected = DEFECTS[defect]
    fill(tmp_path / "in")
    plant(tmp_path / "in")
    sheet = sheet_of(tmp_path / "in", tmp_path / "out")
    lacking = {"no caption": 1} if len(list((tmp_path / "in/a").iterdir())) % 2 else {}
    seen = found(sheet)
    seen.pop("no caption", None)
    assert seen == expected, lacking
    if "duplicate" in expected or "near duplicate" in expected:
        assert (tmp_path / "out/datasheet/same.png").is_file() and len(sheet["groups"]) == 1
    assert json.loads((tmp_path / "out/datasheet/datasheet.json").read_text())["findings"] == sheet["findings"]


def test_all_defects_at_once_are_all_found(tmp_path: Path) -> None:
    fill(tmp_path / "in")
    for plant, _ in DEFECTS.values():
        plant(tmp_path / "in")
    expected: dict[str, int] = {}
    for _, kinds in DEFECTS.values():
        for kind, count in kinds.items():
            expected[kind] = expected.get(kind, 0) + count
    seen = found(sheet_of(tmp_path / "in", tmp_path / "out"))
    assert seen.pop("no caption") == len(DEFECTS) - 2
    assert seen == expected


def test_file_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    fill(tmp_path / "in")
    (tmp_path / "in/a/<b>.png").write_bytes(b"bad")
    sheet = sheet_of(tmp_path / "in", tmp_path / "out")
    assert "&lt;b&gt;.png" in body(sheet, str) and "<b>.png" not in body(sheet, str)
