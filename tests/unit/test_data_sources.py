"""Tars and tables of images give the crops that the same images give in a folder."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from sklearn.datasets import load_digits

import crops
from image_diffusion.core.config.base import parse
from image_diffusion.core.files.atomic import stamp_of
from image_diffusion.core.texts import cell_text
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.quality.contact_sheets import write_sheets
from image_diffusion.data.shards.records import read_record
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import captions_in
from image_diffusion.data.sources.changes import record_source, refresh
from image_diffusion.data.sources.scikit_digits import digits
from image_diffusion.data.sources.table import read_columns
from image_diffusion.stages.datasheet import write_datasheet

GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
LABELS = [3, 10, 7, 3, 10, 7, 3, 3, 3, 10, 7, 3]


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(buffer, "png")
    return buffer.getvalue()


def crops_of(tmp_path: Path, source: dict[str, Any]) -> dict[bytes, str | None]:
    return crops.crops_of(tmp_path / f"crops-{len(list(tmp_path.iterdir()))}", source)


WITH_CLASSES = {PIXELS[i].tobytes(): str(label) for i, label in enumerate(LABELS)}
WITHOUT = dict.fromkeys(WITH_CLASSES)


@pytest.mark.parametrize("kind", ["cls", "txt", "json", "none"])
def test_webdataset_tars(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    for tar in range(2):
        with webdataset.TarWriter(str(tmp_path / f"in/{tar}.tar")) as writer:
            for i in range(tar * 6, tar * 6 + 6):
                label = {"cls": LABELS[i], "txt": f"{LABELS[i]}\n", "json": {"label": LABELS[i], "caption": "a b"}}
                sample: dict[str, Any] = {"__key__": f"some.folder/{i % 6:04d}", "png": PIXELS[i]}
                writer.write(sample | ({kind: label[kind]} if kind in label else {}))
    expected = WITHOUT if kind == "none" else WITH_CLASSES
    assert crops_of(tmp_path, {"type": "webdataset", "path": str(tmp_path / "in")}) == expected
    record = read_record(tmp_path / "crops-1", 0)
    assert {sample.path.split("/")[1] for sample in record.samples} == {"some.folder"}


def test_numeric_classes_are_sorted_by_value_and_others_as_text(tmp_path: Path) -> None:
    rows = [("a.png", "10"), ("b.png", "9"), ("c.png", "10")]
    for name, _ in rows:
        (tmp_path / name).write_bytes(png(0))
    for change, classes in (("", ["9", "10"]), ("x", ["10x", "9x"])):
        with (tmp_path / "table.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("path", "label"), *[(name, label + change) for name, label in rows]])
        source = parse(Source, {"type": "table", "path": str(tmp_path / "table.csv")}, "here")
        assert source.listing().classes == classes


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("labelled", [True, False])
def test_tables(tmp_path: Path, kind: str, labelled: bool) -> None:
    (tmp_path / "pictures, all").mkdir()
    paths = [f"pictures, all/é {i}.png" if i % 2 else str(tmp_path / f"pictures, all/{i}.png") for i in range(12)]
    for i, path in enumerate(paths):
        (tmp_path / path).write_bytes(png(i))
    table = tmp_path / f"table.{kind}"
    if kind == "csv":
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("note", "file", "class"), *zip("x" * 12, paths, LABELS, strict=True)])
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"file": paths, "class": LABELS}), table)
    source = {"type": "table", "path": str(table), "path_column": "file", "label_column": "class" if labelled else None}
    assert crops_of(tmp_path, source) == (WITH_CLASSES if labelled else WITHOUT)


def test_a_tables_bad_rows_are_listed(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    rows = [(f"{i}.png", "a") for i in range(12)] + [("0.png", "b"), ("missing.png", "a"), ("nolabel.png", "")]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    source = {"type": "table", "path": str(tmp_path / "table.csv")}
    config = {"name": "x", "source": source, "resolution": 6, "num_shards": 1, "max_bad_fraction": 0.5}
    crop_dataset(DataConfig.model_validate(config), tmp_path / "out")
    with (tmp_path / "out/quarantine.csv").open() as file:
        assert {(row["path"], row["reason"]) for row in csv.DictReader(file)} == {
            ("0.png", "listed twice"),
            ("missing.png", "cannot be read: No such file or directory"),
            ("nolabel.png", "no class"),
        }


@pytest.mark.parametrize("kind", ["table", "list"])
def test_output_does_not_depend_on_the_project_path(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for project in (tmp_path / "one", tmp_path / "another/place"):
        project.mkdir(parents=True)
        rows = [(f"{i}.png", "a") for i in range(6)]
        for name, _ in rows:
            (project / name).write_bytes(png(1))
        rows += [("missing.png", "a"), ("3.png/not a folder.png", "a")]
        lines = "".join(f"{','.join(row) if kind == 'table' else row[0]}\n" for row in rows)
        path = project / ("in.csv" if kind == "table" else "in.txt")
        path.write_text(("path,label\n" if kind == "table" else "") + lines)
        config = {"name": "x", "source": {"type": kind, "path": str(path)}, "resolution": 6, "num_shards": 2}
        out = project / "out"
        done = crop_dataset(DataConfig.model_validate(config | {"max_bad_fraction": 0.5}), out)
        write_sheets(out, done.manifest, done.records)
        write_datasheet(out, project / "sheet", None)
        read = [each for each in (*out.rglob("*"), *(project / "sheet").rglob("*")) if each.is_file()]
        files = [each for each in read if not each.name.startswith(".")]
        assert {"quarantine.csv", "manifest.json", "datasheet.json", "shard-00000.json"} <= {
            each.name for each in files
        }
        written.append({str(each.relative_to(project)): each.read_bytes() for each in files})
        assert all(str(tmp_path).encode() not in data for data in written[-1].values())
        assert f"Relative paths begin in {project}." in capsys.readouterr().err
    assert written[0] == written[1]


def test_table_classes_are_known_before_images_are_read(tmp_path: Path) -> None:
    table = {"type": "table", "path": str(tmp_path / "table.csv")}
    assert parse(Source, table, "here").known_classes() is None
    (tmp_path / "table.csv").write_text("path,label\na.png,10\nb.png,9\nc.png,\n")
    assert parse(Source, table, "here").known_classes() == ["9", "10"]
    assert parse(Source, table | {"label_column": None}, "here").known_classes() == []
    assert parse(Source, table | {"label_column": "class"}, "here").known_classes() is None


def test_path_errors_of_tables_give_the_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/table.csv").write_text("path\nphotos/1.png\n")
    source = parse(Source, {"type": "table", "path": "in/table.csv", "label_column": None}, "here")
    with pytest.raises(OSError, match=re.escape(f"No such file or directory: {tmp_path}/in/photos/1.png")):
        source.read(source.listing().items[0])
    absent = parse(Source, {"type": "table", "path": "table.csv"}, "here")
    with pytest.raises(ValueError, match=re.escape(f"data.source.path: {tmp_path}/table.csv does not exist")):
        absent.listing()


def tar_of(path: Path, members: dict[str, bytes | None]) -> None:
    """Write a tar of members; a member without bytes is a symbolic link."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            if data is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))


def member_of(path: Path, name: str, size: int, kind: bytes = tarfile.REGTYPE) -> None:
    """Write a sparse tar of one member of this size, which takes no disk space."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 512 + -(-size // 512) * 512 + 10240)


def negative(path: Path, size: int) -> None:
    """Write a tar with a hidden member whose pax header states a negative size, which shifts the next member."""
    member = tarfile.TarInfo(".x.png")
    member.pax_headers = {"size": str(size)}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("x"))
        tar.addfile(member)


def doubled(path: Path) -> None:
    """Write two concatenated tars."""
    tar_of(path, {"1.png": png(1), "1.cls": b"1"})
    first = path.read_bytes()
    tar_of(path, {"2.png": png(2), "2.cls": b"2"})
    path.write_bytes(first + path.read_bytes())


HUGE = 7 << 30

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a way out": (lambda path: tar_of(path, {"../x.png": png(0)}), r"its member '\.\./x\.png' leads out of it"),
    "a way out, deep": (lambda path: tar_of(path, {"a/../../x.png": png(0)}), "leads out of it"),
    "an absolute name": (lambda path: tar_of(path, {"/etc/x.png": png(0)}), "leads out of it"),
    "a link": (lambda path: tar_of(path, {"x.png": None}), "is a link, a device or has"),
    "no tar": (lambda path: path.write_bytes(b"no tar at all" * 100), "cannot be read as a tar"),
    "no images": (lambda path: tar_of(path, {"x.bin": b"x"}), "holds no images"),
    "broken json": (
        lambda path: tar_of(path, {"x.png": png(0), "x.json": b"{"}),
        r"has a member 'x\.json' that cannot be read: Expecting",
    ),
    "deep json": (
        lambda path: tar_of(path, {"x.png": png(0), "x.json": b"[" * 200_000}),
        r"has a member 'x\.json' that cannot be read: maximum recursion depth",
    ),
    "a class that is no text": (
        lambda path: tar_of(path, {"x.png": png(0), "x.cls": b"\xff"}),
        r"has a member 'x\.cls' that cannot be read: line 1: the byte 0xff is not UTF-8",
    ),
    "a huge class": (
        lambda path: member_of(path, "x.cls", HUGE),
        r"its member 'x\.cls' has 7,516,192,768 bytes; a class or a caption has at most 1,048,576\.",
    ),
    "a member with holes": (lambda path: member_of(path, "x.png", 512, tarfile.GNUTYPE_SPARSE), "or has holes"),
    "a huge header": (
        lambda path: member_of(path, "x.png", HUGE, tarfile.XHDTYPE),
        "cannot be read as a tar file: it has a header of 7,516,192,768 bytes",
    ),
    "a size below 0": (lambda path: negative(path, -1), r"is refused: its member '\.x\.png' has -1 bytes\."),
    "a size that leads back": (lambda path: negative(path, -1536), r"is refused: its member '\.x\.png' has -1,536"),
    "a huge name": (lambda path: member_of(path, "x.png", HUGE, tarfile.GNUTYPE_LONGNAME), "it has a header of 7,516"),
    "a class of 5,000 digits": (
        lambda path: tar_of(path, {"x.png": png(0), "x.cls": b"1" * 5000}),
        r"x\.tar has a class of 5,000 characters, 1{20}\.\.\.; a class has at most 255",
    ),
    "two classes of one key": (
        lambda path: tar_of(path, {"x.png": png(0), "x.cls": b"1", "x.CLS": b"2"}),
        r"has two \.cls under the key 'x'",
    ),
    "two tars in one": (doubled, "has data after its end, like tars joined by `cat`"),
    "a tar and something else": (
        lambda path: (tar_of(path, {"1.png": png(1)}), path.write_bytes(path.read_bytes() + b"x")),
        "has data after its end",
    ),
    "a pipe": (os.mkfifo, r"x\.tar is a folder, a pipe or a device, not a file"),
    "two images of one key": (lambda path: tar_of(path, {"x.png": png(0), "x.jpg": png(1)}), "two images under"),
    "cut short in an image": (
        lambda path: (tar_of(path, {f"{i}.png": png(i) * 20 for i in range(9)}), os.truncate(path, 4000)),
        "cut short|cannot be read as a tar",
    ),
    "cut short at a block": (
        lambda path: (tar_of(path, {f"{i}.png": png(i) * 20 for i in range(9)}), os.truncate(path, 512 * 6)),
        "cut short|cannot be read as a tar",
    ),
    "cut short after an image": (
        lambda path: (tar_of(path, {f"{i}.png": bytes(512) for i in range(9)}), os.truncate(path, 512 * 6)),
        "is cut short: the empty block",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_tars_are_rejected_in_one_line(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    make(tmp_path / "x.tar")
    source = parse(Source, {"type": "webdataset", "path": str(tmp_path / "x.tar")}, "here")
    with pytest.raises(ValueError, match=message) as error:
        source.listing()
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]


def test_class_comes_from_cls_then_json_then_txt(tmp_path: Path) -> None:
    told = {"x.txt": b"a caption", "x.json": b'{"label": "json", "caption": "another"}', "x.cls": b"cls"}
    for count, expected in ((1, "a caption"), (2, "json"), (3, "cls")):
        tar_of(tmp_path / "x.tar", {"x.png": png(0), **dict(list(told.items())[:count])})
        source = parse(Source, {"type": "webdataset", "path": str(tmp_path / "x.tar")}, "here")
        assert source.listing().classes == [expected]


@pytest.mark.parametrize("kind", ["tar", "folder", "table"])
def test_files_too_large_for_an_image_are_not_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    if kind == "tar":
        member_of(tmp_path / "in/x.tar", "x.png", HUGE)
    else:
        (tmp_path / "in/x.png").touch()
        os.truncate(tmp_path / "in/x.png", HUGE)
        (tmp_path / "in/x.csv").write_text("path\nx.png\n")
    source = {
        "tar": {"type": "webdataset", "path": str(tmp_path / "in")},
        "folder": {"type": "folder", "path": str(tmp_path / "in")},
        "table": {"type": "table", "path": str(tmp_path / "in/x.csv"), "label_column": None},
    }[kind]
    found = parse(Source, source, "here")
    item = next(each for each in found.listing().items if "csv" not in each.name)
    with pytest.raises(OSError, match="7,516,192,768 bytes, more than 1,073,741,824"):
        found.read(item)


def test_odd_members_are_ignored_or_listed(tmp_path: Path) -> None:
    members = {
        ".hidden.png": b"",
        "__meta__/x.png": b"",
        "a/1.png": png(0),
        "a/1.cls": b"4",
        "2.png": png(1),
        "3.cls": b"4",
    }
    tar_of(tmp_path / "x.tar", members)
    listing = parse(Source, {"type": "webdataset", "path": str(tmp_path / "x.tar")}, "here").listing()
    assert [(item.name, item.label) for item in listing.items] == [("x.tar/a/1", 0)]
    assert listing.rejected == [
        ("x.tar/2", "an image without a class, while others have one"),
        ("x.tar/3", "a class without an image"),
    ]
    assert (listing.classes, len(listing.passed_over)) == (["4"], 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "webdataset", "path": "nowhere"}, "nowhere does not exist"),
        ({"type": "webdataset", "path": "."}, "holds no .tar file"),
        ({"type": "table", "path": "nowhere.csv"}, "nowhere.csv does not exist"),
        ({"type": "table", "path": "header.csv"}, "has no rows"),
        ({"type": "table", "path": "header.csv", "path_column": "file"}, "no column 'file'. Known: path, label"),
        ({"type": "table", "path": "binary.csv"}, "is not valid CSV"),
        ({"type": "table", "path": "binary.parquet"}, "is not valid Parquet"),
    ],
)
def test_early_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "header.csv").write_text("path,label\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80\x00")
    (tmp_path / "binary.parquet").write_bytes(b"PAR2")
    with pytest.raises(ValueError, match=message) as error:
        list(parse(Source, source, "here").file_groups())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,caption\na.png,x\nb.png,a cat, on a mat\n", "line 3 has 3 cells, the header 2; put texts with the"),
        ("path,path,label\na.png,b.png,x\n", "two columns are named 'path'"),
    ],
)
def test_csv_rows_that_do_not_match_the_header_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match=f"table.csv is not valid CSV: {message}"):
        read_columns(tmp_path / "table.csv")


def test_cell_that_is_no_valid_path_is_one_bad_row(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "table.csv").write_text(f"path\n0.png\n{'x' * 300}\na\0b\n")
    source = parse(Source, {"type": "table", "path": str(tmp_path / "table.csv"), "label_column": None}, "here")
    assert [group.names for group in source.file_groups()] == [["table.csv", "0.png"]]
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 1, "max_bad_fraction": 0.9}
    manifest = crop_dataset(DataConfig.model_validate(data), tmp_path / "out").manifest
    assert (manifest["num_samples"], manifest["quarantined"]) == (1, 2)


def test_blank_trailing_cells_and_columns_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("path,label,,\na.png,x,,\nb.png,y,,,,\n")  # as spreadsheets write them
    assert read_columns(tmp_path / "table.csv") == {
        "path": ["a.png", "b.png"], "label": ["x", "y"], "": ["", ""]
    }  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_only_requested_table_columns_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    rows = [{"path": f" {i}.png", "label": "cat", "age": f"age {i}"} for i in range(3)]
    delimiter = "\t" if ending == "tsv" else ","
    lines = [delimiter.join(row) for row in (rows[0], *(row.values() for row in rows))]
    path = tmp_path / f"table.{ending}"
    path.write_text("\n".join(map(json.dumps, rows) if ending == "jsonl" else lines))
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    every = read_columns(path)
    assert list(every) == ["path", "label", "age"] and every["path"] == ["0.png", "1.png", "2.png"]
    with pytest.raises(ValueError, match="no column 'size'. Known: path, label, age"):
        read_columns(path, "size")
    converted: list[str | None] = []
    monkeypatch.setattr(
        "image_diffusion.data.sources.table.cell_text", lambda cell: converted.append(cell) or cell_text(cell)
    )
    assert read_columns(path, "label", "path") == {name: every[name] for name in ("path", "label")}
    (group,) = parse(Source, {"type": "table", "path": str(path)}, "here").file_groups()
    assert len(converted) == 12 and not any("age" in str(cell) for cell in converted)
    assert group.names == [path.name, "0.png", "1.png"]
    for number, name in enumerate(group.names):
        assert group.at(name) == str(tmp_path / name) and group.stamp(number) == stamp_of(tmp_path / name)


@pytest.mark.parametrize("line", ["[]", "5", "null", '"path"'])
def test_json_line_that_is_no_object_is_one_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "table.jsonl").write_text(f'{{"path": "0.png"}}\n{line}\n')
    with pytest.raises(ValueError, match="table.jsonl is not valid JSON, one object a line"):
        read_columns(tmp_path / "table.jsonl", "path")


def test_changed_tars_and_tables_are_detected_and_touched_ones_unchanged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tar_of(tmp_path / "in/x.tar", {"1.png": png(0)})
    (tmp_path / "1.png").write_bytes(png(0))
    (tmp_path / "table.csv").write_text("path,label\n1.png,a\n")
    sources = {
        "tar": (parse(Source, {"type": "webdataset", "path": str(tmp_path / "in")}, "here"), tmp_path / "in/x.tar"),
        "table": (parse(Source, {"type": "table", "path": str(tmp_path / "table.csv")}, "here"), tmp_path / "1.png"),
    }
    for name, (source, file) in sources.items():
        path = tmp_path / name / "source.json"
        assert refresh(source, path)
        record_source(source, path, source.file_groups(), {})
        os.utime(file, ns=(0, 10**18))
        assert not refresh(source, path)
        file.write_bytes(file.read_bytes()[::-1])
        assert refresh(source, path)
        assert json.loads(path.read_text())["source"]["type"] in ("webdataset", "table")


def test_digits_equal_scikit_learn_without_importing_pandas() -> None:
    theirs = load_digits()
    assert np.array_equal(digits().images, theirs.images) and np.array_equal(digits().target, theirs.target)
    code = "import sys; from image_diffusion.data.sources.scikit_digits import digits; digits()"
    line = f"{code}; print('pandas' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    assert printed == "False\n"


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1e"])
def test_captions_beside_images_are_separated_by_line_ends_only(character: str) -> None:
    text = f"a dog{character}on grass"
    assert captions_in(f"{text}\r\na cat\n".encode(), "txt") == [text, "a cat"]
