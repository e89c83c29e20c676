"""Data sets of the package `datasets` give the crops that the same images give in a folder."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.core.config.base import parse
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.changes import record_source, refresh
from saved_data_sets import save_to_disk

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 6, 6, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(buffer, "png")
    return buffer.getvalue()


def dataset_of(labels: list[Any], kind: Any, numbers: list[int] | None = None) -> Any:
    """Return a data set of the numbered images, with labels of a feature type."""
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": png(number), "path": None} for number in (numbers or range(len(labels)))]
    features = datasets.Features({"image": datasets.Image(), "label": kind, "caption": datasets.Value("string")})
    columns = {"image": images, "label": labels, "caption": ["x"] * len(labels)}
    return datasets.Dataset.from_dict(columns, features=features)


def crops_of(tmp_path: Path, **source: Any) -> dict[bytes, str | None]:
    """Return the crops of a source with their classes."""
    output = tmp_path / f"crops-{len(list(tmp_path.iterdir()))}"
    data = {"name": "x", "source": {"type": "huggingface"} | source, "resolution": 6, "num_shards": 2}
    crop_dataset(DataConfig.model_validate(data | {"max_bad_fraction": 0.6}), output)
    found = open_shards(output, "all")
    pixels = found.gather(np.arange(found.num_samples)).permute(0, 2, 3, 1).numpy()
    names = [found.classes[label] if found.classes else None for label in found.labels]
    return {row.tobytes(): name for row, name in zip(pixels, names, strict=True)}


def test_class_labels_keep_their_names_and_numbers(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    labels = [2, 0, 1, 2, 0, 0, 2, 2, 1]
    dataset_of(labels, datasets.ClassLabel(names=["zebra", "ant", "owl"])).save_to_disk(tmp_path / "in")
    names = ["zebra", "ant", "owl"]
    expected = {PIXELS[i].tobytes(): names[label] for i, label in enumerate(labels)}
    assert crops_of(tmp_path, path=str(tmp_path / "in")) == expected
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path / "in")}, "here")
    assert source.listing().classes == names
    without = crops_of(tmp_path, path=str(tmp_path / "in"), label_column=None)
    assert without == dict.fromkeys(expected)


@pytest.mark.parametrize(("kind", "labels"), [("int64", [7, 10, 7, 9]), ("string", ["7", "10", "7", "9"])])
def test_numbers_and_text_can_be_classes(tmp_path: Path, kind: str, labels: list[Any]) -> None:
    datasets = pytest.importorskip("datasets")
    dataset_of(labels, datasets.Value(kind)).save_to_disk(tmp_path / "in")
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path / "in")}, "here")
    assert source.listing().classes == ["7", "9", "10"]
    assert crops_of(tmp_path, path=str(tmp_path / "in")) == {PIXELS[i].tobytes(): str(x) for i, x in enumerate(labels)}


def test_rows_without_a_class_or_an_image_are_listed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = dataset_of([0, -1, None, 1], datasets.ClassLabel(names=["a", "b"]))
    empty = datasets.Dataset.from_dict({"image": [None], "label": [0], "caption": ["x"]}, features=rows.features)
    datasets.concatenate_datasets([rows, empty]).save_to_disk(tmp_path / "in")
    assert crops_of(tmp_path, path=str(tmp_path / "in")) == {PIXELS[0].tobytes(): "a", PIXELS[3].tobytes(): "b"}
    quarantine = (tmp_path / "crops-1/quarantine.csv").read_text()
    assert [line.split(",")[:2] for line in quarantine.splitlines()[1:]] == [
        ["000000001", "no class"],
        ["000000002", "no class"],
        ["000000004", "cannot be read: the row holds no image"],
    ]
    records = [read_record(tmp_path / "crops-1", shard) for shard in range(2)]
    assert {sample.path for record in records for sample in record.samples} == {"000000000", "000000003"}


def test_configured_split_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kind = datasets.Value("string")
    splits = {"train": dataset_of(["a", "b"], kind, [0, 1]), "test": dataset_of(["c"], kind, [2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "in")
    assert crops_of(tmp_path, path=str(tmp_path / "in"), split="test") == {PIXELS[2].tobytes(): "c"}
    for split in (None, "valid"):
        source = parse(Source, {"type": "huggingface", "path": str(tmp_path / "in"), "split": split}, "here")
        with pytest.raises(ValueError, match=rf"split is {split}, but .* holds train, test\. Set it"):
            source.files()
    datasets.DatasetDict({"train": splits["train"]}).save_to_disk(tmp_path / "one")
    assert len(crops_of(tmp_path, path=str(tmp_path / "one"))) == 2


def test_changed_data_set_is_detected_and_resaved_data_set_is_unchanged(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kind = datasets.Value("string")
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path / "in")}, "here")
    path = tmp_path / "source.json"
    dataset_of(["a", "b"], kind).save_to_disk(tmp_path / "in")
    assert refresh(source, path)
    record_source(source, path, source.file_groups(), {})
    dataset_of(["a", "b"], kind).save_to_disk(tmp_path / "in")
    assert not refresh(source, path)
    dataset_of(["a", "c"], kind).save_to_disk(tmp_path / "in")
    assert refresh(source, path) and source.listing().classes == ["a", "c"]


def test_early_errors_are_one_line(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset_of(["a"], datasets.Value("string")).save_to_disk(tmp_path / "in")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/state.json").write_text("{}")
    for change, message in (
        ({"image_column": "picture"}, r"has no column 'picture'\. Known: image, label, caption\."),
        ({"label_column": "class"}, "has no column 'class'"),
        ({"image_column": "caption"}, "column 'caption' is of type string, not bytes of image files"),
        ({"split": "train"}, r"split is train, but .* has no splits\. Leave it out"),
        ({"path": str(tmp_path / "broken")}, "state.json names no files. Save it again"),
    ):
        source = parse(Source, {"type": "huggingface", "path": str(tmp_path / "in")} | change, "here")
        with pytest.raises(ValueError, match=message) as error:
            source.listing()
        assert "\n" not in str(error.value)


def test_damaged_data_set_is_reported_in_one_line(tmp_path: Path) -> None:
    save_to_disk(tmp_path, {"image": [png(0)], "label": ["a"]})
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path)}, "here")
    assert source.read(source.listing().items[0]) == png(0)
    table = tmp_path / "data-00000-of-00001.arrow"
    content = table.read_bytes()
    table.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="data-00000-of-00001.arrow is not valid Arrow") as error:
        source.listing()
    assert "\n" not in str(error.value)
    table.unlink()
    with pytest.raises(ValueError, match="data-00000-of-00001.arrow cannot be read: No such file"):
        source.listing()


def test_row_numbers_are_unique_across_files_and_batches(tmp_path: Path) -> None:
    labels = ["b", "a", None, "b", "a", "b", "a", "b", "a"]
    save_to_disk(tmp_path, {"image": [png(number) for number in range(9)], "label": labels}, num_files=2, batch=2)
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path)}, "here")
    listing = source.listing()
    assert (listing.classes, listing.rejected) == (["a", "b"], [("000000002", "no class")])
    assert [(item.name, listing.classes[item.label or 0], source.read(item)) for item in listing.items] == [
        (f"{number:09d}", label, png(number)) for number, label in enumerate(labels) if label
    ]


def test_only_split_is_the_default_and_several_need_a_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"{split}.arrow").touch()
    for splits, split, file in ((["train"], None, "train.arrow"), (["train", "test"], "test", "test.arrow")):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        source = parse(Source, {"type": "huggingface", "path": str(tmp_path), "split": split}, "here")
        assert list(source.files()) == [file]


def test_missing_pyarrow_is_named_when_listing_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parse(Source, {"type": "huggingface", "path": str(tmp_path)}, "here")
    with pytest.raises(ValueError, match=r"was not written by datasets\.save_to_disk\. Give such a folder"):
        source.files()
    save_to_disk(tmp_path, {"image": [png(0)], "label": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow\. Install it: pip install '.*workflow\]'\.$"):
        source.listing()
