"""Parquet files that hold images, and lists of paths, give the crops that the same images give in a folder."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from crops import crops_of
from image_diffusion.core.config.base import parse
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Item, by_shard
from image_diffusion.data.sources.changes import record_source, refresh

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
LABELS = [3, 10, 7, 3, 10, 7, 3, 3, 3, 10, 7, 3]
WITH_CLASSES = {PIXELS[i].tobytes(): str(label) for i, label in enumerate(LABELS)}
WITHOUT = dict.fromkeys(WITH_CLASSES)

HUGGING_FACE = {"type": "parquet", "path": str(Path(__file__).with_name("twelve.parquet"))}
"""The twelve images, in three row groups: written by `Dataset.to_parquet(..., batch_size=5)` of datasets 5.2.0, with
the features Image, ClassLabel(names=["7", "10", "3"]) and Value("string")."""


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(buffer, "png")
    return buffer.getvalue()


def write(path: Path, columns: dict[str, Any], **how: Any) -> dict[str, Any]:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **how)
    return {"type": "parquet", "path": str(path)}


def test_a_parquet_file_of_hugging_face(tmp_path: Path) -> None:
    assert crops_of(tmp_path / "one", HUGGING_FACE) == WITH_CLASSES
    assert crops_of(tmp_path / "two", HUGGING_FACE, processes=2) == WITH_CLASSES
    assert crops_of(tmp_path / "none", HUGGING_FACE | {"label_column": None}) == WITHOUT
    source = parse(Source, HUGGING_FACE, "here")
    listing = source.listing()
    assert listing.classes == source.known_classes() == ["7", "10", "3"]
    assert [item.name for item in listing.items] == [f"twelve.parquet/{row:09d}" for row in range(12)]
    assert {item.group_key for item in listing.items} == {f"twelve.parquet/{group}" for group in range(3)}
    assert source.read_captions(("text",))["twelve.parquet/000000007"] == ["image 7"]


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.int32(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())]
)
def test_images_as_bytes_in_several_files(tmp_path: Path, kind: Any) -> None:
    told = LABELS if kind == pyarrow.int32() else list(map(str, LABELS))
    for part in range(2):
        rows = range(part * 6, part * 6 + 6)
        labels = pyarrow.array([told[row] for row in rows]).cast(kind)
        columns = {"jpg": pyarrow.array([png(row) for row in rows], pyarrow.large_binary()), "class": labels}
        write(tmp_path / f"in/train-{part}.parquet", columns, row_group_size=4)
    write(tmp_path / "in/test-0.parquet", {"jpg": [png(0)], "class": ["another"]})
    source = {"type": "parquet", "path": str(tmp_path / "in/train-*.parquet")}
    columns = {"image_column": "jpg", "label_column": "class"}
    assert crops_of(tmp_path / "crops", source | columns) == WITH_CLASSES
    assert parse(Source, source | columns, "here").listing().classes == ["3", "7", "10"]
    every = source | columns | {"path": str(tmp_path / "in/*.parquet")}
    assert len(parse(Source, every, "here").listing().items) == 13


def test_rows_without_a_class_or_an_image_are_listed(tmp_path: Path) -> None:
    images = [
        {"bytes": png(0), "path": "0.png"},
        {"bytes": None, "path": "1.png"},
        None,
        {"bytes": png(3), "path": None},
    ]
    source = parse(Source, write(tmp_path / "a.parquet", {"image": images, "label": ["a", "b", "b", None]}), "here")
    listing = source.listing()
    assert listing.rejected == [("a.parquet/000000003", "no class")]
    assert source.read(listing.items[0]) == png(0)
    for item in listing.items[1:]:
        with pytest.raises(OSError, match="the row holds no bytes of an image"):
            source.read(item)


def test_unsuitable_parquet_files_are_reported_in_one_line(tmp_path: Path) -> None:
    paths = write(tmp_path / "paths.parquet", {"image": ["0.png"], "label": ["a"]})
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    for source, message in (
        (HUGGING_FACE | {"image_column": "picture"}, r"no column 'picture'\. Known: image, label, text\."),
        (HUGGING_FACE | {"label_column": "class"}, "no column 'class'"),
        (paths, "column 'image' is of type string, not bytes of image files"),
        (paths | {"path": str(tmp_path / "bad.parquet")}, "bad.parquet is not valid Parquet"),
        (paths | {"path": str(tmp_path / "x-*.parquet")}, "names no file"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            parse(Source, source, "here").listing()
        assert "\n" not in str(error.value)


def test_changed_parquet_file_is_detected(tmp_path: Path) -> None:
    made = write(tmp_path / "a.parquet", {"image": [png(0), png(1)]})
    source = parse(Source, made | {"label_column": None}, "here")
    assert refresh(source, tmp_path / "source.json")
    record_source(source, tmp_path / "source.json", source.file_groups(), {})
    item = source.listing().items[1]
    assert source.read(item) == png(1) and not refresh(source, tmp_path / "source.json")
    write(tmp_path / "a.parquet", {"image": [png(0), png(2)]})
    assert source.read(item) == png(2) and refresh(source, tmp_path / "source.json")


def test_row_groups_stay_whole_if_there_are_enough() -> None:
    items = [Item(f"a/{row:09d}", None, (), f"a/{row // 10}") for row in range(1280)]
    for num_shards, whole in ((4, True), (5, False)):
        groups = [{item.group_key for item in shard} for shard in by_shard(items, num_shards)]
        assert (sum(map(len, groups)) == 128) is whole
    names = [Item(f"{row}.png", None, ()) for row in range(1000)]
    assert all(shard for shard in by_shard(names, 100))


def images_in(folder: Path) -> None:
    folder.mkdir()
    for number in range(12):
        (folder / f"no {number}.png").write_bytes(png(number))


def test_lists_printed_by_find_are_read(tmp_path: Path) -> None:
    images_in(tmp_path / "in")
    for where in (".", str(tmp_path)):  # relative to the list, or absolute
        found = subprocess.run(
            ["find", f"{where}/in", "-type", "f"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        (tmp_path / "list.txt").write_text(found.stdout)
        assert (
            crops_of(tmp_path / f"crops {len(where)}", {"type": "list", "path": str(tmp_path / "list.txt")}) == WITHOUT
        )


def test_lists_with_classes_and_captions(tmp_path: Path) -> None:
    images_in(tmp_path / "in")
    lines = {
        ("path", "label"): [f"in/no {number}.png {label}" for number, label in enumerate(LABELS)],  # format of Caffe
        ("path", "caption", "label"): [f"in/no {number}.png\ta b c\t{label}" for number, label in enumerate(LABELS)],
    }
    for parts, written in lines.items():
        (tmp_path / "list.txt").write_text("\r\n".join([*written, "", ""]))
        source = {"type": "list", "path": str(tmp_path / "list.txt"), "parts": list(parts)}
        assert crops_of(tmp_path / f"crops {len(parts)}", source) == WITH_CLASSES
        parsed = parse(Source, source, "here")
        assert parsed.known_classes() == ["3", "7", "10"] and len(parsed.files()) == 13
    assert parsed.read_captions(())["in/no 7.png"] == ["a b c"]


@pytest.mark.parametrize(
    ("parts", "text", "message"),
    [
        (["path"], "\n", "has no rows"),
        (["path", "label"], "a.png 1\nb.png\n", r"line 2: 'b\.png' has 1 of the parts path, label\. Part them by tabs"),
        (["path", "caption"], "a.png\tb\tc", "has 3 of the parts path, caption"),
        (["label", "path"], "", "must begin with path"),
        (["path", "path"], "", "name nothing twice"),
    ],
)
def test_invalid_lists_are_reported(tmp_path: Path, parts: list[str], text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(Source, {"type": "list", "path": str(tmp_path / "list.txt"), "parts": parts}, "here").listing()
