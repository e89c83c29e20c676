"""Databases written by lmdb give the crops that the same images give in folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.sources.archives import Lmdb
from image_diffusion.data.sources.changes import record_source, refresh

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 9, 12, 3), dtype=np.uint8)


def write(tmp_path: Path, name: str, numbers: range, keys: list[bytes] | None = None) -> None:
    """Write a database as LSUN does, a WebP per hexadecimal key, and the same images into a folder."""
    lmdb = pytest.importorskip("lmdb")
    plain = tmp_path / "plain" / name.split("_")[0]
    plain.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(tmp_path / "lsun" / name)) as database, database.begin(write=True) as transaction:
        for place, number in enumerate(numbers):
            path = plain / f"{number:02d}.webp"
            Image.fromarray(PIXELS[number]).save(path, lossless=True)
            transaction.put(keys[place] if keys else f"{number:040x}".encode(), path.read_bytes())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "lsun").mkdir()


def crops(tmp_path: Path, output: str, **source: Any) -> tuple[dict[str, Any], dict[str, tuple[str, int | None]]]:
    """Return the manifest, and by image number the hash of its crop and its class."""
    config = DataConfig.model_validate({"name": "x", "source": source, "resolution": 8, "num_shards": 2})
    done = crop_dataset(config, tmp_path / output)
    samples = [each for record in done.records for each in record.samples]
    return done.manifest, {str(int(Path(each.path).stem, 16)): (each.pixels, each.label) for each in samples}


def test_lmdb_databases_give_the_classes_and_crops_of_folders(tmp_path: Path) -> None:
    write(tmp_path, "bridge_train_lmdb", range(3))
    write(tmp_path, "bridge_val_lmdb", range(3, 4))
    write(tmp_path, "tower_train_lmdb", range(4, 7))
    manifest, found = crops(tmp_path, "one", type="lmdb", path=str(tmp_path / "lsun"))
    expected, other = crops(tmp_path, "other", type="folder", path=str(tmp_path / "plain"))
    assert manifest["classes"] == expected["classes"] == ["bridge", "tower"]
    assert found == other and len(found) == 7 and manifest["quarantined"] == 0
    unconditional, _ = crops(tmp_path, "none", type="lmdb", path=str(tmp_path / "lsun"), classes="none")
    assert unconditional["classes"] == []
    alone, three = crops(tmp_path, "alone", type="lmdb", path=str(tmp_path / "lsun/tower_train_lmdb"))
    assert alone["classes"] == [] and {key: pixels for key, (pixels, _) in three.items()} == {
        key: found[key][0] for key in ("4", "5", "6")
    }


def test_changed_database_is_detected_and_touched_database_is_unchanged(tmp_path: Path) -> None:
    write(tmp_path, "bridge_train_lmdb", range(3))
    source, path = Lmdb(path=str(tmp_path / "lsun")), tmp_path / "source.json"
    assert refresh(source, path) and not refresh(source, path)
    record_source(source, path, source.file_groups(), {})
    (tmp_path / "lsun/bridge_train_lmdb/data.mdb").touch()
    assert not refresh(source, path)
    write(tmp_path, "bridge_train_lmdb", range(3, 5))
    assert refresh(source, path) and len(source.listing().items) == 5
    write(tmp_path, "tower_train_lmdb", range(5, 6))
    assert refresh(source, path)


def test_any_bytes_may_be_a_key(tmp_path: Path) -> None:
    write(tmp_path, "a_lmdb", range(3), [b"\xff\x00", b"line\nbreak", "schlüssel".encode()])
    source = Lmdb(path=str(tmp_path / "lsun"))
    items = source.listing().items
    assert len({item.name for item in items}) == 3 and all(item.name.isprintable() for item in items)
    assert {source.read(item) for item in items} == {path.read_bytes() for path in tmp_path.glob("plain/a/*")}


def test_invalid_lmdb_databases_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Lmdb(path=str(tmp_path / "lsun"))
    with pytest.raises(ValueError, match=r"lsun holds no data\.mdb\. Give a database"):
        source.files()
    (tmp_path / "lsun/a_lmdb").mkdir()
    (tmp_path / "lsun/a_lmdb/data.mdb").write_bytes(b"not a database" * 1000)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lmdb", None)
        with pytest.raises(ValueError, match=r"needs the package lmdb\. Install it: pip install 'image-diffusion"):
            source.listing()
    pytest.importorskip("lmdb")
    with pytest.raises(ValueError, match=r"a_lmdb cannot be read as an LMDB database: .*Write it again"):
        source.listing()


def test_empty_database_and_deleted_key_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "a_lmdb", range(0))
    source = Lmdb(path=str(tmp_path / "lsun"))
    with pytest.raises(ValueError, match=r"lsun holds no images"):
        source.listing()
    write(tmp_path, "a_lmdb", range(1))
    (item,) = source.listing().items
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "lsun/a_lmdb")) as database, database.begin(write=True) as transaction:
        transaction.delete(f"{0:040x}".encode())
    with pytest.raises(OSError, match="its key is no longer there"):
        source.read(item)
