"""Tars behind URLs or from commands give the crops of local tars; each is fetched once and none is kept."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from image_diffusion.core.files import store
from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.process.errors import sentence_on
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record
from image_diffusion.data.sources import tars as tar_sources
from image_diffusion.data.sources.changes import refresh
from image_diffusion.stages.datasheet import write_datasheet


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tars of five images in three classes, by webdataset's own writer; two of the 30 images are equal."""
    folder = tmp_path_factory.mktemp("tars")
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)
    pixels[29] = pixels[0]
    for tar in range(6):
        with webdataset.TarWriter(str(folder / f"train-{tar:03d}.tar"), encoder=False) as writer:
            for number in range(5 * tar, 5 * tar + 5):
                image = b"P6 4 4 255\n" + pixels[number].tobytes()
                writer.write({"__key__": f"{number:04d}", "ppm": image, "cls": str(number % 3).encode()})
    return folder


class Server:
    """Web server of a folder. url: its address. sent: how often each file was requested."""

    def __init__(self, folder: Path) -> None:
        sent: Counter[str] = Counter()

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                sent[self.path] += 1

        self.sent = sent
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tars: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store, "_WAITS_S", ())
    found = Server(tars)
    yield found
    found.close()


def config(*urls: str, classes: Any = 3, **changes: Any) -> DataConfig:
    source = {"type": "tar_stream", "urls": list(urls), "classes": classes}
    values = {"name": "x", "source": source, "resolution": 4, "num_shards": 4, "max_bad_fraction": 0.5}
    return DataConfig.model_validate(values | changes)


def pixels_of(folder: Path) -> list[tuple[int, bytes]]:
    every = open_shards(folder, "all")
    stored = every.gather(np.arange(every.num_samples)).numpy()
    return sorted((label, each.tobytes()) for label, each in zip(every.labels.tolist(), stored, strict=True))


def test_streamed_tars_give_the_crops_of_local_tars_and_are_fetched_once(
    tars: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "token=secret")
    local = {"name": "x", "source": {"type": "webdataset", "path": str(tars)}, "resolution": 4, "num_shards": 4}
    crop_dataset(DataConfig.model_validate(local), tmp_path / "local")
    streamed = config(f"{server.url}/train-{{000..005}}.tar?${{TOKEN}}")
    done = crop_dataset(streamed, tmp_path / "http", processes=2)
    assert pixels_of(tmp_path / "http") == pixels_of(tmp_path / "local")
    assert done.manifest["histogram"] == [10, 10, 10] and done.manifest["classes"] == ["0", "1", "2"]
    assert server.sent == {f"/train-{number:03d}.tar?token=secret": 1 for number in range(6)}
    assert [record.num_samples for record in done.records] == [10, 10, 5, 5]
    assert done.records[1].samples[0].path == f"{server.url}/train-001.tar/0005"

    again = crop_dataset(streamed, tmp_path / "http", processes=2)
    assert again.num_written == 0 and server.sent.total() == 6
    longer = config(f"{server.url}/train-{{000..005}}.tar?${{TOKEN}}", "pipe:cat " + str(tars / "train-000.tar"))
    assert crop_dataset(longer, tmp_path / "http").num_written == 1
    named = config(f"{server.url}/train-{{000..005}}.tar?${{TOKEN}}", classes=["2", "1", "0"])
    assert crop_dataset(named, tmp_path / "http").num_written == 4


def test_tars_from_commands_are_on_disk_one_at_a_time(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    seen = []
    plain = tar_sources.members_of
    monkeypatch.setattr(tar_sources, "members_of", lambda file, *given, **more: (
        seen.append((os.fstat(file.fileno()).st_size, list((tmp_path / "tmp").iterdir()))),
        plain(file, *given, **more),
    )[1])  # fmt: skip
    crop_dataset(config(f"pipe:cat {tars}/train-{{000..005}}.tar"), tmp_path / "out")
    assert seen == [((tars / "train-000.tar").stat().st_size, [])] * 6
    assert len(pixels_of(tmp_path / "out")) == 30 and list((tmp_path / "tmp").iterdir()) == []


def test_duplicates_are_dropped_across_tars_and_the_sheet_names_images(tars: Path, tmp_path: Path) -> None:
    done = crop_dataset(config(f"pipe:cat {tars}/train-{{000..005}}.tar", duplicates="drop"), tmp_path / "out")
    assert done.manifest["num_samples"] == 29 and done.manifest["dropped"] == 1
    (dropped,) = [each.path for record in done.records for each in record.dropped]
    assert dropped == f"pipe:cat {tars}/train-005.tar/0029"
    assert write_datasheet(tmp_path / "out", tmp_path / "sheet", None)["num_samples"] == 29


def test_crops_are_planned_without_opening_tars(tmp_path: Path) -> None:
    source = config("https://nowhere.invalid/{0000..0999}.tar", "s3://nowhere/{0..8}/{00..10}.tar").source
    assert refresh(source, tmp_path / "source.json") and not refresh(source, tmp_path / "source.json")
    assert read_json(tmp_path / "source.json")["files"] == 0 and source.known_classes() == ["0", "1", "2"]
    names = [item.name for item in source.listing().items]
    assert len(names) == 1000 + 99 and names[999:1001] == [
        "https://nowhere.invalid/0999.tar", "s3://nowhere/0/00.tar",
    ]  # fmt: skip


def test_configured_classes_are_labels_and_otherwise_texts_are_captions(tars: Path, tmp_path: Path) -> None:
    done = crop_dataset(config(f"pipe:cat {tars}/train-{{000..005}}.tar", classes=["1", "0"]), tmp_path / "out")
    assert done.manifest["histogram"] == [10, 10] and done.manifest["quarantined"] == 10
    assert read_record(tmp_path / "out", 0).quarantined[0].reason == "cannot be read: '2' is not in data.source.classes"
    with webdataset.TarWriter(str(tmp_path / "told.tar"), encoder=False) as writer:
        image = b"P6 4 4 255\n" + bytes(48)
        writer.write({"__key__": "0", "ppm": image, "txt": b"a cat\na dog"})
        writer.write({"__key__": "1", "ppm": image, "cls": b"0"})
        writer.write({"__key__": "2", "cls": b"0"})
    url = f"pipe:cat {tmp_path}/told.tar"
    assert config(url, classes=None).source.read_captions(()) == {f"{url}/0": ["a cat", "a dog"]}
    with pytest.raises(ValueError, match=r"data\.source\.classes is set"):
        config(url).source.read_captions(())
    done = crop_dataset(config(url, max_bad_fraction=0.9), tmp_path / "some")
    assert sorted(each.reason.split(": ")[1] for record in done.records for each in record.quarantined) == [
        "'a cat\na dog' is not in data.source.classes", "a class without an image",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["{url}/nowhere.tar?${TOKEN}"], "nowhere.tar cannot be fetched: .* ended with status 22"),
        (["pipe:head -c 2000 {tars}/train-000.tar"], "train-000.tar (is cut short|cannot be read as a tar)"),
        (["pipe:exit 3"], "pipe:exit 3 cannot be fetched: the command that fetches it ended with status 3"),
        (["ftp://x/y.tar"], "'ftp://x/y.tar' is not the URL of a tar. It begins with one of pipe:, http://"),
        (["/data/x.tar"], "is not the URL of a tar"),
        (["http://x/{0..999999999}.tar"], "these are 1,000,000,000 tars"),
        (["http://x/{9..0}.tar"], "these are 0 tars"),
        (["http://x/0.tar", "http://x/{0..3}.tar?${TOKEN}"], "names a tar twice"),
    ],
)
def test_unavailable_tars_are_named_in_the_error(
    urls: list[str], message: str, tars: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "token=secret")
    given = [url.replace("{url}", server.url).replace("{tars}", str(tars)) for url in urls]
    with pytest.raises(ValueError, match=message):
        crop_dataset(config(*given), tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_rule_over_values_is_rejected_before_fetching(tars: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source\.type: tar_stream has none"):
        crop_dataset(config(f"pipe:cat {tars}/train-000.tar", keep="a > 5"), tmp_path / "out")


def test_a_full_temporary_folder_is_one_error_that_names_it(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tar_sources.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        crop_dataset(config(f"pipe:cat {tars}/train-000.tar"), tmp_path / "out")
    assert str(sentence_on(caught.value)).startswith(f"The disk is full: {tmp_path} could not be written. ")
