"""Text, classes and table cells written by other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign import labels, listing, png, write_parquet, write_tar
from image_diffusion.core.config.base import parse
from image_diffusion.core.texts import cell_text, class_in, decoded, lines_in
from image_diffusion.data.sources import Source


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfcat\r\n",
        b"cat  \n",
        b"cat\r",
        "\ufeffcat\n".encode("utf-16-le"),
        "\ufeffcat".encode("utf-16-be"),
    ],
    ids=["byte order mark", "blanks", "CR", "UTF-16 LE", "UTF-16 BE"],
)
def test_class_names_do_not_depend_on_encoding_or_spaces(tmp_path: Path, data: bytes) -> None:
    write_tar(tmp_path / "x.tar", {"1.png": png(1), "1.cls": b"cat", "2.png": png(2), "2.cls": data})
    assert listing(type="webdataset", path=f"{tmp_path}/x.tar").classes == ["cat"]
    table = decoded(data).strip()
    text = f"path,label\r\n1.png,cat\r\n2.png, {table}\r\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "table.csv").write_bytes(text.encode(encoding))
        assert listing(type="table", path=f"{tmp_path}/table.csv").classes == ["cat"]
        (tmp_path / "list.txt").write_bytes("1.png\tcat\r\n2.png\tcat  \r\n".encode(encoding))
        assert listing(type="list", path=f"{tmp_path}/list.txt", parts=["path", "label"]).classes == ["cat"]
        (tmp_path / "dataset.json").write_bytes('{"labels": [["1.png", 0], ["2.png", 0]]}'.encode(encoding))
        for name in ("1.png", "2.png"):
            (tmp_path / name).write_bytes(png(1))
        assert labels(listing(type="folder", path=str(tmp_path), classes="labels")) == ["0", "0"]


def test_accents_are_normalised(tmp_path: Path) -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    (tmp_path / "table.csv").write_text(f"path,label\n1.png,{composed}\n2.png,{apart}\n", encoding="utf-8")
    assert listing(type="table", path=f"{tmp_path}/table.csv").classes == [composed]
    (tmp_path / "list.txt").write_text(f"1.png\t{composed}\n2.png\t{apart}\n", encoding="utf-8")
    found = parse(Source, {"type": "list", "path": f"{tmp_path}/list.txt", "parts": ["path", "label"]}, "here")
    assert found.listing().classes == found.known_classes() == [composed]
    members = {"1.png": png(1), "1.txt": composed.encode(), "2.png": png(2), "2.json": b'{"label": "cafe\\u0301"}'}
    write_tar(tmp_path / "x.tar", members)
    assert listing(type="webdataset", path=f"{tmp_path}/x.tar").classes == [composed]


def test_other_encodings_are_reported_with_line_numbers() -> None:
    with pytest.raises(ValueError, match=r"line 2: the byte 0xe9 is not UTF-8 \(it may be Latin-1\)"):
        decoded("one\ncafé\n".encode("latin-1"))
    assert lines_in(b"a\r\nb\rc\nd") == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("cell", "text"), [(None, ""), (float("nan"), ""), (3.0, "3"), (3, "3"), (2.5, "2.5"), (" a ", "a"), ("", "")]
)
def test_cells_are_read_as_text_and_classes(cell: Any, text: str) -> None:
    assert cell_text(cell) == text
    assert class_in(cell) == (text or None)


def test_null_is_not_a_class(tmp_path: Path) -> None:
    told = [b'{"label": "cat"}', b'{"label": null}', b'{"label": NaN}', b'{"label": 2.0}']
    members = {f"{i}.{end}": data for i, label in enumerate(told) for end, data in (("png", png(i)), ("json", label))}
    write_tar(tmp_path / "x.tar", members)
    found = listing(type="webdataset", path=f"{tmp_path}/x.tar")
    assert found.classes == ["2", "cat"]
    assert [name for name, _ in found.rejected] == ["x.tar/1", "x.tar/2"]
    numbers = [0.0, 10.0, float("nan"), 2.0, None]
    write_parquet(tmp_path / "in/a.parquet", image=[png(i) for i in range(5)], label=numbers)
    found = listing(type="parquet", path=f"{tmp_path}/in")
    assert found.classes == ["0", "2", "10"]
    assert labels(found) == ["0", "10", "2"]
    assert found.rejected == [(f"a.parquet/{row:09d}", "no class") for row in (2, 4)]
    write_parquet(tmp_path / "table.parquet", path=[f"{i}.png" for i in range(5)], label=numbers)
    assert listing(type="table", path=f"{tmp_path}/table.parquet").classes == ["0", "2", "10"]


def test_classes_of_parquet_files_are_joined_by_name(tmp_path: Path) -> None:
    images = [png(i) for i in range(3)]
    write_parquet(tmp_path / "in/a.parquet", ["cat", "dog"], image=images, label=[0, 1, 1])
    write_parquet(tmp_path / "in/b.parquet", ["dog", "bird", "cat"], image=images, label=[0, 2, 1])
    source = parse(Source, {"type": "parquet", "path": f"{tmp_path}/in"}, "here")
    found = source.listing()
    assert found.classes == source.known_classes() == ["cat", "dog", "bird"]
    assert labels(found) == ["cat", "dog", "dog", "dog", "cat", "bird"]
    write_parquet(tmp_path / "in/c.parquet", image=images, label=[0, 2, 1])
    with pytest.raises(ValueError, match=r"a.parquet names the classes of column 'label', but .*c.parquet has numbers"):
        source.listing()


def test_tab_separated_and_json_lines_tables_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("path\tlabel\n1.png\tcat, grey\n2.png\tdog\n")
    assert listing(type="table", path=f"{tmp_path}/t.tsv").classes == ["cat, grey", "dog"]
    lines = b'{"file_name": "1.png", "text": "a cat"}\r\n\r\n{"file_name": "2.png", "text": null}\r\n'
    (tmp_path / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    table = {"type": "table", "path": f"{tmp_path}/metadata.jsonl", "path_column": "file_name", "label_column": None}
    source = parse(Source, table, "here")
    assert [item.name for item in source.listing().items] == ["1.png", "2.png"]
    assert source.read_captions(("text",)) == {"1.png": ["a cat"], "2.png": []}
    (tmp_path / "metadata.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="is not valid JSON, one object a line"):
        source.listing()
