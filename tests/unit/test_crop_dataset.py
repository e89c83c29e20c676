"""Crop stage over a folder: files that it writes, and files that it does not rewrite."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import atomic_write, read_json
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset, crop_part
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record
from image_diffusion.data.sources.changes import refresh
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.tars import TarStream
from image_diffusion.stages import crop
from warm import warm_python


def fill(folder: Path, count: int, classes: int = 3, side: int = 4) -> None:
    """Write tiny images as PPM, the fastest format to write and read."""
    generator = np.random.default_rng(count)
    pixels = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    for number in range(count):
        path = folder / f"class-{number % classes}" / f"{number:05d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"P6 {side} {side} 255\n".encode() + pixels[number].tobytes())


def config(folder: Path, **changes: Any) -> DataConfig:
    values = {"name": "tiny", "source": {"type": "folder", "path": str(folder)}, "resolution": 4, "num_shards": 5}
    return DataConfig.model_validate(values | changes)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def times_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}


def test_bytes_do_not_depend_on_processes_and_second_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "in", 60)
    (tmp_path / "in/class-0/bad.png").write_bytes(b"bad")
    one = crop_dataset(config(tmp_path / "in"), tmp_path / "one")
    two = crop_dataset(config(tmp_path / "in"), tmp_path / "two", processes=2)
    assert one.num_written == two.num_written == 5
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    before, times = bytes_of(tmp_path / "one"), times_of(tmp_path / "one")
    (tmp_path / "one/manifest.json").unlink()
    assert crop_dataset(config(tmp_path / "in"), tmp_path / "one").num_written == 0
    assert (bytes_of(tmp_path / "one"), times_of(tmp_path / "one")) == (before, times)
    ends = re.findall(r"^crop: (\S+) of 61 images \(100%\)", capsys.readouterr().err, re.MULTILINE)
    assert ends == ["61"] * 3  # counts every image, also bad images and those in unchanged shards


@pytest.mark.parametrize(
    ("change", "images"),
    [
        pytest.param("edited", 10_000, marks=[pytest.mark.slow, pytest.mark.long]),
        ("edited", 300),
        ("deleted", 300),
        ("added", 300),
        ("broken", 300),
        ("repaired", 300),
    ],
)
def test_changed_image_rewrites_only_its_shard(tmp_path: Path, change: str, images: int) -> None:
    source = tmp_path / "in"
    fill(source, images)
    settings = config(source, num_shards=20)
    assert crop_dataset(settings, tmp_path / "out").num_written == 20
    before = bytes_of(tmp_path / "out")
    image = source / "class-1/00001.ppm"
    original = image.read_bytes()
    extra = source / "class-2/new.ppm"
    try:
        if change == "edited":
            image.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        elif change == "deleted":
            image.unlink()
        elif change == "added":
            extra.write_bytes(original)
        else:
            image.write_bytes(b"broken")
        assert crop_dataset(settings, tmp_path / "out").num_written == 1
        if change == "repaired":
            image.write_bytes(original)
            assert crop_dataset(settings, tmp_path / "out").num_written == 1
    finally:
        image.write_bytes(original)
        extra.unlink(missing_ok=True)
    after = bytes_of(tmp_path / "out")
    changed = {name for name in before if after[name] != before[name]}
    assert len([name for name in changed if name.endswith(".tar")]) == (0 if change == "repaired" else 1)
    crop_dataset(settings, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({"resolution": 3}, 5),
        ({"channels": 1}, 5),
        ({"background": (0, 0, 0)}, 5),
        ({"min_side": 2}, 5),
        ({"num_shards": 6}, 6),
        ({"name": "other"}, 0),
        ({"validation_fraction": 0.5}, 0),
        ({"max_bad_fraction": 0.5}, 0),
    ],
)
def test_only_settings_that_change_pixels_rewrite_all_shards(
    tmp_path: Path, changes: dict[str, Any], written: int
) -> None:
    fill(tmp_path / "in", 40)
    crop_dataset(config(tmp_path / "in"), tmp_path / "out")
    assert crop_dataset(config(tmp_path / "in", **changes), tmp_path / "out").num_written == written


def test_stale_shards_are_deleted(tmp_path: Path) -> None:
    fill(tmp_path / "in", 40)
    crop_dataset(config(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "out/.shard-00000.tar.abc.tmp").write_bytes(b"left by a killed run")
    crop_dataset(config(tmp_path / "in", num_shards=2), tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in left if name.endswith(".tar")} == {"shard-00000.tar", "shard-00001.tar"}
    assert not any(name.endswith(".tmp") for name in left)


def test_temporary_files_of_a_concurrent_run_are_kept(tmp_path: Path) -> None:
    fill(tmp_path / "in", 40)
    crop_dataset(config(tmp_path / "in"), tmp_path / "out")
    with atomic_write(tmp_path / "out/shard-00000.tar") as file:
        file.write((tmp_path / "out/shard-00000.tar").read_bytes())
        crop_dataset(config(tmp_path / "in"), tmp_path / "out")
        assert len(list((tmp_path / "out").glob(".*.tmp"))) == 1


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "gone", "bad record", "no record", "other format"])
def test_a_damaged_shard_is_written_again(tmp_path: Path, damage: str) -> None:
    fill(tmp_path / "in", 40)
    crop_dataset(config(tmp_path / "in"), tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    tar, record = tmp_path / "out/shard-00002.tar", tmp_path / "out/shard-00002.json"
    data = bytearray(tar.read_bytes())
    if damage == "flipped bit":
        data[2000] ^= 1
        tar.write_bytes(data)
    elif damage == "cut short":
        tar.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        tar.unlink()
    elif damage == "bad record":
        record.write_text(record.read_text()[:-20])
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 0}))
    assert crop_dataset(config(tmp_path / "in"), tmp_path / "out").num_written == 1
    assert bytes_of(tmp_path / "out") == before


def test_a_flat_folder_is_unconditional(tmp_path: Path) -> None:
    fill(tmp_path / "in", 9, classes=1)
    manifest = crop_dataset(config(tmp_path / "in/class-0"), tmp_path / "flat").manifest
    assert (manifest["classes"], manifest["histogram"], manifest["num_samples"]) == ([], [], 9)
    dataset = open_shards(tmp_path / "flat")
    assert dataset.num_classes == 0 and (dataset.labels == 0).all()
    fill(tmp_path / "in", 9)
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"}
    assert crop_dataset(config(tmp_path / "in", source=source), tmp_path / "none").manifest["classes"] == []


def test_classes_are_top_level_folders_with_normalised_unicode_names(tmp_path: Path) -> None:
    fill(tmp_path / "in", 4, classes=1)
    image = (tmp_path / "in/class-0/00000.ppm").read_bytes()
    for name in ("\u00e9t\u00e9/a.ppm", "e\u0301te\u0301/a.ppm", "class-0/sub/00000.ppm"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(image)
    manifest = crop_dataset(config(tmp_path / "in"), tmp_path / "out").manifest
    assert manifest["classes"] == ["class-0", "\u00e9t\u00e9"]
    assert manifest["histogram"] == [5, 2]


def test_the_digits_need_no_files(tmp_path: Path) -> None:
    settings = config(tmp_path, source={"type": "digits"}, resolution=32, num_shards=2)
    manifest = crop_dataset(settings, tmp_path / "out").manifest
    assert manifest["num_samples"] == 1797
    assert manifest["classes"] == [str(digit) for digit in range(10)]
    assert min(manifest["histogram"]) == 174 and max(manifest["histogram"]) == 183
    dataset = open_shards(tmp_path / "out", "all", in_background=True)
    pixels = dataset.gather(np.arange(1797)).float()
    assert pixels.shape == (1797, 3, 32, 32)
    assert 60 < pixels.mean() < 90 and pixels.max() == 255
    assert (pixels[:, 0] == pixels[:, 1]).all()


def test_records_map_samples_to_source_files(tmp_path: Path) -> None:
    fill(tmp_path / "in", 30, side=7)
    manifest = crop_dataset(config(tmp_path / "in"), tmp_path / "out").manifest
    dataset = open_shards(tmp_path / "out", "all")
    keys, position = set(), 0
    for shard in range(5):
        record = read_record(tmp_path / "out", shard)
        assert [sample.path for sample in record.samples] == sorted(sample.path for sample in record.samples)
        stream = webdataset.WebDataset(str(tmp_path / f"out/shard-{shard:05d}.tar"), shardshuffle=False)
        for sample, found in zip(record.samples, stream.decode(), strict=True):
            with Image.open(tmp_path / "in" / sample.path) as image:
                assert sample.size == image.size == (7, 7)
            assert found["__key__"] == sample.key
            assert found["cls"] == sample.label == int(sample.path[6]) == dataset.labels[position]
            assert (found["npy"] == dataset.gather(np.array([position]))[0].numpy()).all()
            keys.add(sample.key)
            position += 1
    assert len(keys) == position == manifest["num_samples"] == 30


def test_too_many_bad_files_stop_the_run_with_one_line(tmp_path: Path) -> None:
    fill(tmp_path / "in", 8)
    for number in range(2):
        (tmp_path / f"in/class-0/{number}.png").write_text("text")
    with pytest.raises(ValueError, match=r"2 of 10 files \(20\.0%\) gave no crop, more than .*max_bad_fraction = 0\.1"):
        crop_dataset(config(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()
    assert (tmp_path / "out/quarantine.csv").read_text().count("not an image") == 2
    assert crop_dataset(config(tmp_path / "in", max_bad_fraction=0.2), tmp_path / "out").manifest["quarantined"] == 2
    for path in (tmp_path / "in").rglob("*.ppm"):
        path.unlink()
    with pytest.raises(ValueError, match="None of the 2 files"):
        crop_dataset(config(tmp_path / "in", max_bad_fraction=1.0), tmp_path / "out")


def test_split_depends_on_content_and_is_stable_when_images_are_added(tmp_path: Path) -> None:
    fill(tmp_path / "in", 400)
    settings = config(tmp_path / "in", validation_fraction=0.25)

    def splits() -> dict[str, set[bytes]]:
        crop_dataset(settings, tmp_path / "out")
        found = {}
        for split in ("train", "validation"):
            dataset = open_shards(tmp_path / "out", split)  # type: ignore[arg-type]
            found[split] = {row.tobytes() for row in dataset.gather(np.arange(dataset.num_samples)).numpy()}
        return found

    before = splits()
    assert not before["train"] & before["validation"]
    assert len(before["train"]) + len(before["validation"]) == 400
    assert 70 < len(before["validation"]) < 130
    shutil.copy(tmp_path / "in/class-0/00000.ppm", tmp_path / "in/class-1/copy.ppm")
    fill(tmp_path / "in/class-3", 200)
    after = splits()
    assert before["train"] <= after["train"] and before["validation"] <= after["validation"]
    assert not after["train"] & after["validation"]


def test_command_logs_results_and_touched_source_stays_fresh(tmp_path: Path) -> None:
    fill(tmp_path / "in", 12)
    settings = config(tmp_path / "in")
    (tmp_path / "data.yaml").write_text(to_yaml(dump(settings)))
    refresh(settings.source, tmp_path / "source.json")
    arguments = ["--config", "data.yaml", "--source", "source.json", "--output", "crops/manifest.json"]
    command = [warm_python(), "-m", "image_diffusion", "crop", *arguments, "--journal", "journal"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "crop: 12 crops in 5 shards (5 written), 0 files quarantined\n"
    log = (tmp_path / "journal/crop/attempt-0001.jsonl").read_text()
    assert '"images":12' in log and '"key":"sheet"' in log and '"key":"histograms"' in log
    for path in (tmp_path / "in").rglob("*.ppm"):
        path.touch()
    assert not refresh(settings.source, tmp_path / "source.json")
    shutil.rmtree(tmp_path / "in")
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith("in does not exist. Give the folder that holds the images.")
    assert "Traceback" not in failed.stderr


def transparent(folder: Path, mode: str) -> None:
    for number in range(4):
        Image.new(mode, (8, 8), (number + 1,) * len(mode)).save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("mode", "channels", "message"),
    [
        ("RGB", 4, "data.channels is 4, which includes alpha, but none of the 4 images has an alpha channel"),
        ("L", 2, "data.channels is 2, which includes alpha"),
        ("RGBA", 3, "data.channels is 3, but every one of the 4 images has an alpha channel"),
        ("LA", 1, "Set data.channels to 2 to keep it, or data.background to the colour"),
    ],
)
def test_missing_and_dropped_alpha_channels_are_reported(
    tmp_path: Path, mode: str, channels: int, message: str
) -> None:
    (tmp_path / "in").mkdir()
    transparent(tmp_path / "in", mode)
    with pytest.raises(ValueError, match=message):
        crop_dataset(config(tmp_path / "in", channels=channels), tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_background_allows_dropping_alpha_and_mixed_images_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    transparent(tmp_path / "in", "RGBA")
    done = crop_dataset(config(tmp_path / "in", background=(0, 0, 0)), tmp_path / "out")
    assert done.manifest["flags"] == {"alpha": 4}
    Image.new("RGB", (8, 8)).save(tmp_path / "in/plain.png")
    for channels in (3, 4):
        crop_dataset(config(tmp_path / "in", channels=channels), tmp_path / f"out-{channels}")


class Reads:
    """Record of the names of images read from folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, read = list[str](), Folder.read
        monkeypatch.setattr(Folder, "read", lambda source, item: (self.names.append(item.name), read(source, item))[1])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def in_parts(settings: DataConfig, output: Path, of: int, processes: int = 1) -> list[Path]:
    """Crop all parts, the last one first; return their note files."""
    notes = [output / f"part-{index}-of-{of}.json" for index in range(of)]
    for index in reversed(range(of)):
        crop_part(settings, output, notes[index], (index, of), processes)
    return notes


@pytest.mark.parametrize(("of", "processes"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow), (5, 1), (7, 1)])
@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_parts_write_the_same_bytes_as_one_call(tmp_path: Path, of: int, processes: int, duplicates: str) -> None:
    fill(tmp_path / "in", 60)
    (tmp_path / "in/class-0/bad.png").write_bytes(b"bad")
    (tmp_path / "in/class-1/twin.ppm").write_bytes((tmp_path / "in/class-1/00001.ppm").read_bytes())
    settings = config(tmp_path / "in", duplicates=duplicates)
    for way in ("one", "parts"):
        refresh(settings.source, tmp_path / way / "source.json")
    crop_dataset(settings, tmp_path / "one/crops", tmp_path / "one/source.json")
    notes = in_parts(settings, tmp_path / "parts/crops", of, processes)
    crop_dataset(settings, tmp_path / "parts/crops", tmp_path / "parts/source.json", 1, notes)
    found = bytes_of(tmp_path / "parts/crops")
    assert {name: found[name] for name in found if not name.startswith("part-")} == bytes_of(tmp_path / "one/crops")
    for name in ("source.json", ".source-cache.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_last_call_after_parts_reads_no_images(tmp_path: Path, reads: Reads) -> None:
    fill(tmp_path / "in", 60)
    settings, output = config(tmp_path / "in"), tmp_path / "out"
    notes = in_parts(settings, output, 3)
    assert len(reads.names) == len(set(reads.names)) == 60
    times = times_of(output)
    assert crop_dataset(settings, output, made=notes).num_written == 0
    assert len(reads.names) == 60 and times_of(output) == times


@pytest.mark.parametrize("what", ["image", "shard", "record", "settings"])
def test_changes_after_the_parts_are_detected(tmp_path: Path, reads: Reads, what: str) -> None:
    fill(tmp_path / "in", 60)
    settings, output = config(tmp_path / "in"), tmp_path / "out"
    notes = in_parts(settings, output, 2)
    reads.names.clear()
    if what == "image":
        (tmp_path / "in/class-1/00001.ppm").write_bytes((tmp_path / "in/class-2/00002.ppm").read_bytes())
    elif what == "shard":
        path = output / "shard-00003.tar"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif what == "record":
        (output / "shard-00003.json").write_text("{")
    else:
        settings = config(tmp_path / "in", resolution=3)
    done = crop_dataset(settings, output, made=notes)
    assert done.num_written == (5 if what == "settings" else 1)
    assert len(reads.names) < 60 if what in ("shard", "record") else len(reads.names) >= 60
    crop_dataset(settings, tmp_path / "fresh")
    made = {name: data for name, data in bytes_of(output).items() if not name.startswith("part-")}
    assert made == bytes_of(tmp_path / "fresh")


def test_crop_command_runs_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "in", 30)
    (tmp_path / "data.yaml").write_text(to_yaml(dump(config(tmp_path / "in"))))
    notes = [str(tmp_path / f"out/part-{index}-of-2.json") for index in range(2)]

    def command(*given: str) -> None:
        monkeypatch.setattr(sys, "argv", ["crop", "--config", str(tmp_path / "data.yaml"), *given])
        crop.main()

    for index, note in enumerate(notes):
        command("--part", f"{index}/2", "--output", note)
    command("--made", *notes, "--output", str(tmp_path / "out/manifest.json"))
    told = capsys.readouterr().out
    assert "part 0 of 2 is done, 3 shards written" in told and "part 1 of 2 is done, 2 shards written" in told
    assert "crop: 30 crops in 5 shards (0 written)" in told
    assert read_json(tmp_path / "out/manifest.json")["num_samples"] == 30


def test_remote_tars_are_fetched_once(tmp_path: Path) -> None:
    """Each tar belongs to one shard, and so to one part."""
    fill(tmp_path / "in", 12)
    for number in range(4):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for path in sorted((tmp_path / "in").rglob(f"*{number}.ppm")):
                tar.add(path, path.name)
    urls = [f"pipe:echo {number} >> {tmp_path}/fetched; cat {tmp_path}/{number}.tar" for number in range(4)]
    settings = DataConfig(name="x", source=TarStream(urls=urls), resolution=4, num_shards=3)
    notes = in_parts(settings, tmp_path / "parts", 2)
    crop_dataset(settings, tmp_path / "parts", made=notes)
    assert sorted((tmp_path / "fetched").read_text().split()) == ["0", "1", "2", "3"]
    crop_dataset(settings, tmp_path / "one")
    made = {name: data for name, data in bytes_of(tmp_path / "parts").items() if not name.startswith("part-")}
    assert made == bytes_of(tmp_path / "one")
