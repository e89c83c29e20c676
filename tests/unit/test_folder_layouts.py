"""Common folder layouts: splits, wrapping folders, names with dots, files other than images."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from foreign import labels, listing, png, write_parquet, write_tar
from image_diffusion.core.config.base import parse
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources import Source


def fill(folder: Path, *names: str) -> dict[str, Any]:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"words" if name.endswith((".txt", ".md", ".jsonl")) else png(number))
    return {"type": "folder", "path": str(folder)}


def fill_zip(file: Path, *names: str) -> dict[str, Any]:
    with zipfile.ZipFile(file, "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, png(number))
    return {"type": "zip", "path": str(file)}


SPLITS = tuple(
    f"{split}/{name}/{i}.png" for split in ("train", "val", "test") for name in ("cat", "dog") for i in (0, 1)
)


@pytest.mark.parametrize("fill", [fill, fill_zip])
def test_split_folders_are_not_classes(tmp_path: Path, fill: Any) -> None:
    source = fill(tmp_path / "in", *SPLITS)
    message = r"in holds the folders test, train, val: splits, not classes\..*in/train.*\{level: 2\}"
    with pytest.raises(ValueError, match=message) as error:
        listing(**source)
    assert "\n" not in str(error.value)
    for level, classes in ((2, ["cat", "dog"]), (1, ["test", "train", "val"])):
        found = parse(Source, source | {"classes": {"level": level}}, "here")
        assert found.listing().classes == classes and len(found.listing().items) == len(SPLITS)
        assert found.known_classes() in (classes, None)


@pytest.mark.parametrize(
    "names",
    [
        ("train/0.png", "train/metadata.jsonl"),
        ("Training/0.png", "Testing/0.png"),
        ("train/a/0.png", "valid/a/0.png", "extra/a/0.png"),
    ],
    ids=["images in one split", "other words", "and another folder"],
)
def test_other_split_names_are_not_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    source = parse(Source, fill(tmp_path / "in", *names), "here")
    for ask in (source.listing, source.known_classes):
        with pytest.raises(ValueError, match="splits, not classes"):
            ask()


@pytest.mark.parametrize("fill", [fill, fill_zip])
def test_folders_of_splits_are_held_out_by_name(tmp_path: Path, fill: Any) -> None:
    source = fill(tmp_path / "in", *SPLITS) | {"classes": {"level": 2}}
    data: dict[str, Any] = {"name": "x", "source": source, "resolution": 8, "num_shards": 3}
    crops = tmp_path / "crops"
    crop_dataset(parse(DataConfig, data | {"held_out": ["val/*", "test/*"]}, "here"), crops)
    every, train = open_shards(crops, "all"), open_shards(crops, "train")
    validation = open_shards(crops, "validation")
    assert (train.num_samples, validation.num_samples, open_shards(crops, "test").num_samples) == (4, 8, 0)
    assert validation.held_out().all() and not train.held_out().any()
    records = [json.loads((crops / f"shard-{shard:05d}.json").read_text()) for shard in range(3)]
    names = [sample["path"] for record in records for sample in record["samples"]]
    held_out = [number for number, name in enumerate(names) if not name.startswith("train/")]
    assert every.manifest["held_out"] == held_out
    crop_dataset(parse(DataConfig, data, "here"), crops)
    assert open_shards(crops, "train").num_samples == 12 and open_shards(crops, "train").digest != train.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": ["vall/*"]}, r"data\.held_out: 'vall/\*' matches none of 12 images, such as test/cat/0\.png"),
        ({"held_out": ["*"]}, "matches all 12 images"),
        ({"held_out": ["val/*"], "validation_fraction": 0.5}, "Set one of them"),
    ],
    ids=["none", "all", "both"],
)
def test_invalid_held_out_settings_are_rejected_before_any_work(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = fill(tmp_path / "in", *SPLITS) | {"classes": {"level": 2}}
    with pytest.raises(ValueError, match=message):
        crop_dataset(
            parse(DataConfig, {"name": "x", "source": source, "resolution": 8} | changes, "here"), tmp_path / "crops"
        )
    assert not (tmp_path / "crops").exists()


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", "bus/0.png", "train/0.png", "tram/0.png")
    assert listing(**source).classes == ["bus", "train", "tram"]


def test_single_wrapping_folder_is_reported_or_skipped(tmp_path: Path) -> None:
    names = ("pets/cat/0.png", "pets/dog/1.png", "pets/dog/2.png")
    with pytest.raises(ValueError, match=r"in holds one folder, pets, and that holds 2: cat, dog\. Set .*in/pets"):
        listing(**fill(tmp_path / "in", *names))
    found = listing(**fill_zip(tmp_path / "x.zip", *names, "pets/.DS_Store"))
    assert labels(found) == ["cat", "dog", "dog"] and found.passed_over == ["pets/.DS_Store"]
    assert found.notices == (f"{tmp_path}/x.zip: the classes are the folders in pets, which holds all others",)
    wrapped = fill_zip(tmp_path / "y.zip", *(f"pets/{name}" for name in SPLITS))
    with pytest.raises(ValueError, match=r"y.zip/pets holds the folders test, train, val.*\{level: 3\}"):
        listing(**wrapped)
    assert listing(**wrapped, classes={"level": 3}).classes == ["cat", "dog"]


def test_text_folders_are_not_classes_and_texts_are_not_bad_images(tmp_path: Path) -> None:
    images = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(2)]
    source = fill(tmp_path / "in", *images, "docs/README.md", "cat/about.txt", "notes.txt", "cat/@eaDir/0.png/x.jpg")
    found = parse(Source, source, "here")
    assert found.known_classes() == ["cat", "dog"]
    assert found.listing().kinds_passed_over() == {"@eaDir": 1}
    config = DataConfig.model_validate({"name": "x", "source": source, "resolution": 4, "max_bad_fraction": 0.0})
    manifest = crop_dataset(config, tmp_path / "out").manifest
    assert manifest["classes"] == ["cat", "dog"] and manifest["quarantined"] == 3


def test_webdataset_names_with_dots(tmp_path: Path) -> None:
    members = {f"photo 1.{i}.{end}": data for i in range(3) for end, data in (("jpg", png(i)), ("cls", b"%d" % i))}
    members |= {f"b{i}.{end}": data for i in range(3) for end, data in (("image.jpg", png(i)), ("cls", b"3"))}
    members |= {"c.jfif": png(4), "c.cls": b"4", "c.mask.png": png(5), "d.heic": b"x", "d.cls": b"4", "e.npy": b"x"}
    write_tar(tmp_path / "x.tar", members)
    found = listing(type="webdataset", path=f"{tmp_path}/x.tar")
    assert [item.name for item in found.items] == [
        *(f"x.tar/b{i}" for i in range(3)), "x.tar/c", *(f"x.tar/photo 1.{i}" for i in range(3)),
    ]  # fmt: skip
    assert labels(found) == ["3", "3", "3", "4", "0", "1", "2"]
    assert sorted(found.passed_over) == ["x.tar/c.mask.png", "x.tar/d.heic", "x.tar/e.npy"]
    assert found.rejected == [("x.tar/d", "a class without an image: .heic is not read")]


def test_webdataset_names_are_samples_but_image_parts_are_rejected(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", dict.fromkeys(["john.doe.jpg", "john.smith.jpg", "mary.sue.jpg"], png(0)))
    names = [item.name for item in listing(type="webdataset", path=f"{tmp_path}/x.tar").items]
    assert names == ["x.tar/john.doe", "x.tar/john.smith", "x.tar/mary"]
    write_tar(tmp_path / "y.tar", dict.fromkeys(["1.image.jpg", "1.mask.jpg", "2.image.jpg", "2.mask.jpg"], png(0)))
    with pytest.raises(ValueError, match="has several images under the key '1': image, mask"):
        listing(type="webdataset", path=f"{tmp_path}/y.tar")


def test_captions_are_not_classes(tmp_path: Path) -> None:
    texts = {f"{i}.{end}": data for i in range(20) for end, data in (("jpg", png(i)), ("txt", b"photo number %d" % i))}
    write_tar(tmp_path / "x.tar", texts)
    with pytest.raises(ValueError, match="20 images hold 20 different texts, as captions do. Set data.source.labels"):
        listing(type="webdataset", path=f"{tmp_path}/x.tar")
    assert listing(type="webdataset", path=f"{tmp_path}/x.tar", labels=False).classes == []


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_files_of_several_splits_are_not_joined_by_default(tmp_path: Path, kind: str) -> None:
    suffix = {"parquet": ".parquet", "webdataset": ".tar"}[kind]
    for name in ("train-00000-of-00001", "validation-00000-of-00001", "set-test-000"):
        path = tmp_path / f"in/{name}{suffix}"
        path.parent.mkdir(exist_ok=True)
        if kind == "parquet":
            write_parquet(path, image=[png(0)], label=[name])
        else:
            write_tar(path, {"0.png": png(0), "0.cls": name.encode()})
    message = re.escape(
        "in holds files of several splits: test, train, validation. Set data.source.path to a pattern, "
    )
    with pytest.raises(ValueError, match=message):
        listing(type=kind, path=f"{tmp_path}/in")
    assert listing(type=kind, path=f"{tmp_path}/in/*train*{suffix}").classes == ["train-00000-of-00001"]
    assert len(listing(type=kind, path=f"{tmp_path}/in/*{suffix}").items) == 3


def test_ignored_files_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(tmp_path / "x.tar", {"0.png": png(0), "0.cls": b"a", "0.npy": b"x", "1.npy": b"x", ".hidden": b""})
    source = {"type": "webdataset", "path": f"{tmp_path}/x.tar"}
    config = DataConfig.model_validate({"name": "x", "source": source, "resolution": 4, "num_shards": 1})
    manifest = crop_dataset(config, tmp_path / "out").manifest
    assert (manifest["ignored"], manifest["passed_over"]) == (3, {".npy": 2, ".hidden": 1})
    assert "crop: 3 files are passed over: 2 x .npy, 1 x .hidden; for example x.tar/" in capsys.readouterr().err


def test_unread_caption_table_is_reported(tmp_path: Path) -> None:
    found = listing(**fill(tmp_path / "in", "0.png", "metadata.jsonl"))
    assert len(found.notices) == 1
    assert found.notices[0].startswith(f"{tmp_path}/in/metadata.jsonl is not read: {{type: table, path: ")
    assert "path_column: file_name} as data.source" in found.notices[0]
    assert "(label_column: null where it has no column label)" in found.notices[0]


def test_class_with_only_damaged_images_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = fill(tmp_path / "in", "ant/0.png", "bee/1.png", "cow/2.png")
    (tmp_path / "in/bee/1.png").write_bytes(b"damaged")
    given = {"name": "x", "source": source, "resolution": 4, "num_shards": 1, "max_bad_fraction": 0.5}
    crop_dataset(DataConfig.model_validate(given), tmp_path / "out")
    assert "crop: 1 of 3 classes have no image: bee." in capsys.readouterr().err
    assert open_shards(tmp_path / "out", "train").untrained() == ["bee"]
