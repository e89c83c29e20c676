"""data.keep: a rule over columns of the images' metadata, which is parsed and never executed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.filter_expression import MissingValue, parse_rule
from image_diffusion.data.cropped.dataset import CropPlan, crop_dataset
from image_diffusion.data.shards.records import read_record, tar_path
from image_diffusion.stages.datasheet import write_datasheet

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 6, 6, 3), dtype=np.uint8)
SCORES = [4.0, 6.5, 5.0, None, 9.25, 5.5]
LANGUAGES = ["en", "de", "en", "en", "fr", "de"]
RULE = 'aesthetic > 4.5 and language in ("en", "de")'
KEPT = {PIXELS[i].tobytes() for i in (1, 2, 5)}


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ("a > 5", True), ("a > 6", False), ("4 < a <= 6 < 7", True), ("4 < a <= 5", False), ("a == 6", True),
        ("a != 6", False), ("a >= -1", True), ("text_number < 10", True), ("text_number < other_number", True),
        ("word == 'cat'", True), ("word < 'dog'", True), ("word in ('dog', 'cat')", True), ("word in ('dog',)", False),
        ("word not in ['dog', 'cat']", False), ("a in (1, 6)", True), ("yes", True), ("not yes", False), ("no", False),
        ("not (a > 5 and no)", True), ("a > 7 or word == 'cat' and yes", True), ("flag == True", True), ("5 < a", True),
    ],
)  # fmt: skip
def test_rules_evaluate_as_expected(rule: str, holds: bool) -> None:
    values = {"a": 6, "text_number": "9", "other_number": "10", "word": "cat", "yes": "True", "no": False, "flag": True}
    assert parse_rule(rule).matches(values) is holds


@pytest.mark.parametrize(
    "rule",
    [
        "__import__('os').system('true')", "a.b > 1", "a[0] > 1", "(lambda: a)() > 1", "[x for x in a] > 1",
        "f'{a}' > 1", "a + 1 > 2", "a ** 9 ** 9 > 1", "a if b else c", "(a := 1) > 0", "a is b", "a in b", "a > b'x'",
        "a > ~1", "1 > 0", "", "a >", "import os", "a; b", "a > {1}", "not a + 1", "-a > 1", "a in ('x', f())",
        "(" * 300 + "a" + ")" * 300,
    ],
)  # fmt: skip
def test_invalid_rules_are_rejected_with_the_configuration(rule: str) -> None:
    with pytest.raises(ValueError):
        DataConfig(name="x", source={"type": "digits"}, resolution=6, keep=rule)  # type: ignore[arg-type]


def test_missing_and_incomparable_values_are_errors() -> None:
    assert parse_rule("b > 1 and a > 2 or c").names == ("a", "b", "c")
    for values in ({}, {"a": None}, {"a": ""}):
        with pytest.raises(MissingValue, match="a"):
            parse_rule("a > 1").matches(values)
    with pytest.raises(ValueError, match="'cat' and 1 cannot be compared"):
        parse_rule("a > 1").matches({"a": "cat"})
    with pytest.raises(ValueError, match="a is 'cat', not true or false. Compare it"):
        parse_rule("a").matches({"a": "cat"})
    assert not parse_rule("a > 1 and b > 2").matches({"a": 1})  # b is not evaluated


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(buffer, "png")
    return buffer.getvalue()


def table(folder: Path) -> dict[str, Any]:
    for i in range(6):
        (folder / f"{i}.png").write_bytes(png(i))
    with (folder / "table.csv").open("w", newline="") as file:
        paths = [f"{i}.png" for i in range(6)]
        csv.writer(file).writerows([("path", "aesthetic", "language"), *zip(paths, SCORES, LANGUAGES, strict=True)])
    return {"type": "table", "path": str(folder / "table.csv"), "label_column": None}


def parquet(folder: Path) -> dict[str, Any]:
    columns = {"image": [png(i) for i in range(6)], "aesthetic": SCORES, "language": LANGUAGES}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return {"type": "parquet", "path": str(folder), "label_column": None}


def told(number: int) -> dict[str, Any]:
    return {"language": LANGUAGES[number]} | ({"aesthetic": SCORES[number]} if SCORES[number] else {})


def files(folder: Path) -> dict[str, Any]:
    for i in range(6):
        (folder / f"{i}.png").write_bytes(png(i))
        (folder / f"{i}.json").write_text(json.dumps(told(i)))
    return {"type": "folder", "path": str(folder)}


def tars(folder: Path) -> dict[str, Any]:
    with webdataset.TarWriter(str(folder / "a.tar")) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i:04d}", "png": png(i), "json": told(i) | {"label": 7}, "cls": 7})
    return {"type": "webdataset", "path": str(folder)}


def crop(source: dict[str, Any], output: Path, keep: str | None) -> dict[str, Any]:
    data = {"name": "x", "source": source, "resolution": 6, "num_shards": 1, "keep": keep}
    return crop_dataset(DataConfig.model_validate(data), output).manifest


@pytest.mark.parametrize("make", [table, parquet, files, tars])
def test_images_that_fail_the_rule_are_left_out_and_reported(tmp_path: Path, make: Any) -> None:
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    manifest = crop(source, tmp_path / "crops", RULE)
    assert manifest["num_samples"] == 3 and manifest["quarantined"] == 0
    whole = tar_path(tmp_path / "crops", 0).read_bytes()
    assert all(whole.find(pixels[:8]) < 0 for pixels in (PIXELS[i].transpose(2, 0, 1).tobytes() for i in (0, 3, 4)))
    names = sorted(each.path for each in read_record(tmp_path / "crops", 0).samples)
    with (tmp_path / "crops/quarantine.csv").open() as file:
        reasons = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    assert len(names) == 3 and sorted(reasons.values()) == ["data.keep: no aesthetic", *[f"data.keep: not {RULE}"] * 2]
    found = {each["kind"]: each for each in write_datasheet(tmp_path / "crops", tmp_path / "sheet", None)["findings"]}
    assert found["not wanted"]["examples"] == [f"{name}: {reason}" for name, reason in sorted(reasons.items())]


def test_first_row_of_a_duplicated_image_decides(tmp_path: Path) -> None:
    source = table(tmp_path) | {"label_column": "label"}
    (tmp_path / "table.csv").write_text("path,label,score\n0.png,a,9\n1.png,b,9\n0.png,b,1\n")
    data = {"name": "x", "source": source, "resolution": 6, "num_shards": 1, "keep": "score > 5"}
    config = DataConfig.model_validate(data)
    plan = CropPlan(config.source, config.rule, config.num_shards, data)
    assert [(item.name, item.label) for item in plan.listing.items] == [("0.png", 0), ("1.png", 1)]


def test_rule_does_not_change_shards_of_kept_images(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = table(tmp_path / "in")
    before = crop(source, tmp_path / "crops", None)
    after = crop(source, tmp_path / "crops", "language != 'xx'")
    assert before == after
    rows = [
        line for line in (tmp_path / "in/table.csv").read_text().splitlines() if not line.startswith(("0", "3", "4"))
    ]
    (tmp_path / "in/table.csv").write_text("\n".join(rows))
    by_hand = crop(source, tmp_path / "by_hand", None)
    assert crop(table(tmp_path / "in"), tmp_path / "kept", RULE)["shards"] == by_hand["shards"]


def test_inapplicable_rules_are_reported(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = table(tmp_path / "in")
    for keep, message in (
        ("aesthetics > 5", r"has no column 'aesthetics'\. Known: path, aesthetic, language"),
        ("language > 5", r"data\.keep is 'language > 5', but of 0\.png 'en' and 5 cannot be compared"),
        ("aesthetic > 50", r"data\.keep leaves none of 6 images; the first one has 'data\.keep: not aesthetic > 50'"),
    ):
        with pytest.raises(ValueError, match=message):
            crop(source, tmp_path / "crops", keep)
    with pytest.raises(ValueError, match=r"data\.source\.type: digits has none\. Use a table"):
        crop({"type": "digits"}, tmp_path / "crops", "a > 1")
