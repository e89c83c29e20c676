"""Near duplicates are found despite changes, different images are not; how `crop` handles duplicates."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.centre_crop import centre_crop
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.quality.duplicates import (
    chains,
    groups,
    near_duplicates,
    pairs_across_splits,
    pixel_hash,
)
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record, record_path
from photographs import CHANGES, tiles, views

PHOTOGRAPHS = tiles()


def pixels(image: Image.Image, side: int = 64) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(centre_crop(image, side)).transpose(2, 0, 1))


def test_different_photographs_are_not_duplicates() -> None:
    crops = [pixels(image) for image in PHOTOGRAPHS]
    assert len(crops) > 30
    assert near_duplicates([views(crop) for crop in crops], lambda i: crops[i]) == []


@pytest.mark.parametrize("side", [32, 64, 96])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found(change: str, side: int) -> None:
    """At least 95 of 100, in both directions and for any number of threads."""
    count = len(PHOTOGRAPHS)
    crops = [pixels(image, side) for image in (*PHOTOGRAPHS, *map(CHANGES[change], PHOTOGRAPHS))]
    texts = [views(crop) for crop in crops]
    assert near_duplicates(texts, lambda i: crops[i], []) == []  # no held-out image to compare
    found = near_duplicates(texts, lambda i: crops[i], processes=2)
    assert found is not None and all(second - first == count for first, second, _ in found)
    assert len(found) >= 0.95 * count
    assert (
        near_duplicates(texts, lambda i: crops[i], range(count))
        == found
        == near_duplicates(texts, lambda i: crops[i], range(count, 2 * count))
    )


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_duplicates_are_found_for_any_number_of_channels(channels: int) -> None:
    crops = [np.repeat(pixels(image)[:1], channels, axis=0) for image in PHOTOGRAPHS[:5]]
    crops += [crop[:, :, ::-1].copy() for crop in crops]
    found = near_duplicates([views(crop) for crop in crops], lambda i: crops[i])
    assert [(a, b) for a, b, _ in found or []] == [(i, i + 5) for i in range(5)]


def test_flat_crops_are_not_compared_and_too_many_matches_give_none() -> None:
    plain = [np.full((3, 32, 32), value, np.uint8) for value in (0, 0, 200)]
    assert [views(crop) for crop in plain] == ["", "", ""]
    assert near_duplicates(["", "", ""], lambda i: plain[i]) == []
    assert groups(map(pixel_hash, plain)) == [[0, 1]]
    crowd = [views(pixels(PHOTOGRAPHS[0]))] * 100
    assert near_duplicates(crowd, lambda i: plain[0]) is None


def test_hash_search_finds_all_near_matches_with_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty of 8,000 hashes are copies of others with 0 to 6 bits changed."""
    draw = np.random.default_rng(0)
    bits = draw.integers(2**63, size=(8000, 5), dtype=np.uint64)
    changed = [draw.choice(63, size=number % 7, replace=False) for number in range(20)]
    bits[-20:] = bits[:20]
    bits[-20:, 0] ^= np.array([sum(1 << int(bit) for bit in each) for each in changed], dtype=np.uint64)
    compared = 0
    count_bits = np.bitwise_count

    def counted(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
        nonlocal compared
        compared += words.size
        return count_bits(words)

    monkeypatch.setattr(np, "bitwise_count", counted)
    same = np.repeat(np.arange(32, dtype=np.uint8)[None, None], 32, axis=1)
    texts = [each.astype(">u8").tobytes().hex() for each in bits]
    found = near_duplicates(texts, lambda place: same)
    assert {(number, 7980 + number) for number in range(20)} <= {(a, b) for a, b, _ in found or []}
    assert compared < 0.02 * len(bits) ** 2  # all pairs in five views, two directions and mirrored: 18 times that


def test_connected_pairs_are_grouped() -> None:
    assert chains([(0, 1), (4, 5), (1, 9), (5, 6)]) == [[0, 1, 9], [4, 5, 6]]
    # 1 moves to training for 0, then 2 for 1; 7 and 8 are both held out, and stay.
    assert pairs_across_splits([(0, 1), (1, 2), (7, 8)], [1, 2, 7, 8]) == [1, 2]


def settings(folder: Path, **changes: Any) -> DataConfig:
    values = {"name": "x", "source": {"type": "folder", "path": str(folder)}, "resolution": 32, "num_shards": 8}
    return DataConfig.model_validate(values | changes)


def fill(folder: Path) -> None:
    for number, image in enumerate(PHOTOGRAPHS):
        path = folder / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def tars(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dropping_duplicates_changes_only_their_shards(tmp_path: Path, processes: int) -> None:
    """The shards equal those of the folder without the copies, which have the later names."""
    source = tmp_path / "in"
    fill(source)
    crop_dataset(settings(source), tmp_path / "clean")
    copies = {"a/copy of 02.png": "a/02.png", "b/copy of 02.bmp": "a/02.png", "b/z.png": "b/03.png"}
    for copy, original in copies.items():
        Image.open(source / original).save(source / copy)
    crop_dataset(settings(source), tmp_path / "kept")
    done = crop_dataset(settings(source, duplicates="drop"), tmp_path / "dropped", processes=processes)
    assert tars(tmp_path / "dropped") == tars(tmp_path / "clean")
    holders = {record.shard for record in done.records if record.dropped}
    changed = {name for name, data in tars(tmp_path / "kept").items() if data != tars(tmp_path / "clean")[name]}
    assert changed == {f"shard-{shard:05d}.tar" for shard in holders}
    assert done.manifest["dropped"] == 3 and done.manifest["quarantined"] == 0
    with (tmp_path / "dropped/quarantine.csv").open() as file:
        told = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    assert told == {copy: f"the same crop as {original}" for copy, original in copies.items()}

    # Switch the setting, switch it back, repeat unchanged: the affected shards, the same shards, none.
    files = {path.name: path.read_bytes() for path in (tmp_path / "dropped").iterdir()}
    assert crop_dataset(settings(source, duplicates="drop"), tmp_path / "dropped").num_written == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "dropped").iterdir()} == files
    shutil.copytree(tmp_path / "kept", tmp_path / "turned")
    assert crop_dataset(settings(source, duplicates="drop"), tmp_path / "turned").num_written == len(holders)
    assert {path.name: path.read_bytes() for path in (tmp_path / "turned").iterdir()} == files
    assert crop_dataset(settings(source), tmp_path / "turned").num_written == len(holders)
    assert tars(tmp_path / "turned") == tars(tmp_path / "kept")

    # If the first copy is deleted, the next by name is kept.
    (source / "a/02.png").unlink()
    crop_dataset(settings(source, duplicates="drop"), tmp_path / "dropped")
    there = {sample.path for shard in range(8) for sample in read_record(tmp_path / "dropped", shard).samples}
    assert "a/copy of 02.png" in there and "b/copy of 02.bmp" not in there


@pytest.mark.parametrize("change", CHANGES)
def test_near_duplicates_of_training_images_are_not_held_out(tmp_path: Path, change: str) -> None:
    fill(tmp_path / "in")
    for number, image in enumerate(PHOTOGRAPHS):
        CHANGES[change](image).save(tmp_path / "in" / "ab"[number % 2] / f"{number:02d} again.png")
    data = settings(tmp_path / "in", validation_fraction=0.3)
    done = crop_dataset(data, tmp_path / "out")
    names = [sample.path for record in done.records for sample in record.samples]
    held_out = open_shards(tmp_path / "out", "validation")
    train = open_shards(tmp_path / "out", "train")
    moved = done.manifest["not_held_out"]
    assert moved and len(moved) == len(set(moved))
    assert held_out.num_samples + train.num_samples == len(names) and held_out.num_samples > 0
    without = Path(shutil.copytree(tmp_path / "out", tmp_path / "plain"))
    manifest = read_json(without / "manifest.json")
    assert manifest.pop("not_held_out") == moved
    write_json(without / "manifest.json", manifest)
    by_hash = {names[i] for i in np.flatnonzero(_is_held_out(without))}
    left = by_hash - {names[i] for i in moved}
    apart = [name for name in left if _twin(name) not in left]
    assert len(apart) <= 0.05 * len(PHOTOGRAPHS)
    assert open_shards(without, "train").digest != train.digest


def test_images_stay_held_out_if_all_have_near_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for number in range(60):
        picture = PHOTOGRAPHS[number % 2].resize((64 + number, 64 + number))
        picture.save(tmp_path / "in" / f"{number}.png")
    done = crop_dataset(settings(tmp_path / "in", validation_fraction=0.2), tmp_path / "out")
    held_out = open_shards(tmp_path / "out", "validation").num_samples
    assert held_out and "not_held_out" not in done.manifest
    assert f"each of {held_out} held-out images has a near duplicate that is trained on" in capsys.readouterr().err


def _twin(name: str) -> str:
    return name.replace(" again", "") if " again" in name else name.replace(".png", " again.png")


def _is_held_out(folder: Path) -> NDArray[np.bool_]:
    every, held_out = open_shards(folder, "all"), open_shards(folder, "validation")
    return np.isin(every._row, held_out._row)


def test_digits_are_too_alike_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"name": "x", "source": {"type": "digits"}, "resolution": 32, "num_shards": 2, "validation_fraction": 0.2}
    done = crop_dataset(DataConfig.model_validate(data), tmp_path)
    assert "not_held_out" not in done.manifest and "too alike" in capsys.readouterr().err


def test_record_of_an_earlier_version_is_read_and_its_shard_rewritten(tmp_path: Path) -> None:
    fill(tmp_path / "in")
    crop_dataset(settings(tmp_path / "in"), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    record = json.loads(record_path(tmp_path / "out", 3).read_text())
    for sample in record["samples"]:
        for name in ("format", "mode", "pixels", "look"):
            del sample[name]
    del record["dropped"]
    record.pop("seal", None)
    write_json(record_path(tmp_path / "out", 3), record)
    assert read_record(tmp_path / "out", 3).samples[0].pixels == ""
    assert crop_dataset(settings(tmp_path / "in"), tmp_path / "out").num_written == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
