"""Sets of torchvision.datasets give the crops that the same images give in a folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from crops import crops_of
from image_diffusion.core.config.base import parse
from image_diffusion.data.sources import Source
from image_diffusion.data.sources import torchvision as torchvision_set
from image_diffusion.data.sources.changes import record_source, refresh

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
LABELS = [3, 1, 7, 3, 1, 7, 3, 3, 3, 1, 7, 3]


@pytest.fixture(autouse=True)
def _anew() -> None:
    torchvision_set._load.cache_clear()


def idx(array: np.ndarray) -> bytes:
    """Encode in MNIST's format: two zero bytes, 8 for uint8, the number of dimensions, their sizes, the values."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def mnist_files() -> dict[str, bytes]:
    """Return MNIST files of twelve training images and no test images."""
    none = np.zeros((0,), np.uint8)
    return {
        "train-images-idx3-ubyte": idx(PIXELS[..., 0]), "train-labels-idx1-ubyte": idx(np.array(LABELS, np.uint8)),
        "t10k-images-idx3-ubyte": idx(none.reshape(0, 6, 6)), "t10k-labels-idx1-ubyte": idx(none),
    }  # fmt: skip


GREY = [np.repeat(PIXELS[i, ..., :1], 3, axis=2).tobytes() for i in range(12)]


def test_mnist_from_its_files(tmp_path: Path) -> None:
    import torchvision

    raw = tmp_path / "in/MNIST/raw"
    raw.mkdir(parents=True)
    for name, data in mnist_files().items():
        (raw / name).write_bytes(data)
    source = {"type": "torchvision", "name": "MNIST", "path": str(tmp_path / "in")}
    names = torchvision.datasets.MNIST.classes
    expected = {GREY[i]: names[label] for i, label in enumerate(LABELS)}
    assert crops_of(tmp_path / "crops", source) == expected
    assert crops_of(tmp_path / "none", source | {"classes": "none"}) == dict.fromkeys(expected)
    parsed = parse(Source, source, "here")
    assert len(parsed.files()) == 4 and parsed.listing().classes == names


def test_cifar10_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    folder, pixels = tmp_path / "in/cifar-10-batches-py", np.zeros((12, 32, 32, 3), np.uint8)
    pixels[:, :6, :6] = PIXELS
    folder.mkdir(parents=True)
    listed = {}
    for name, rows in (("data_batch_1", range(6)), ("data_batch_2", range(6, 12)), ("test_batch", range(0))):
        data = pixels[list(rows)].transpose(0, 3, 1, 2).reshape(len(rows), 3072)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [LABELS[row] for row in rows]}))
        listed[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    names = [f"class {number}" for number in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    meta = {"filename": "batches.meta", "key": "label_names"}
    meta["md5"] = hashlib.md5((folder / "batches.meta").read_bytes()).hexdigest()
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [*listed.items()][:2])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", [*listed.items()][2:])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "meta", meta)
    source = parse(Source, {"type": "torchvision", "name": "CIFAR10", "path": str(tmp_path / "in")}, "here")
    listing = source.listing()
    assert listing.classes == names and [item.label for item in listing.items] == LABELS
    for number, item in enumerate(listing.items):
        with Image.open(io.BytesIO(source.read(item))) as image:
            assert (np.asarray(image) == pixels[number]).all()


def test_torchvision_sets_of_folders_and_tables(tmp_path: Path) -> None:
    """Food101 stores classes in the private attribute `_labels`, EuroSAT next to the file paths."""
    for i, label in enumerate(LABELS):
        for path in (f"food/food-101/images/f{label}/{i}.jpg", f"euro/eurosat/2750/e{label}/{i}.png"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[i]).save(tmp_path / path, "png")
    (tmp_path / "food/food-101/meta").mkdir()
    for split in ("train", "test"):
        listed = {f"f{label}": [f"f{label}/{i}" for i in range(12) if LABELS[i] == label] for label in (1, 3, 7)}
        (tmp_path / f"food/food-101/meta/{split}.json").write_text(json.dumps(listed))
    for name, folder, letter in (("Food101", "food", "f"), ("EuroSAT", "euro", "e")):
        source: dict[str, Any] = {"type": "torchvision", "name": name, "path": str(tmp_path / folder)}
        source |= {"options": {"split": "test"}} if name == "Food101" else {}
        expected = {PIXELS[i].tobytes(): f"{letter}{label}" for i, label in enumerate(LABELS)}
        assert crops_of(tmp_path / name, source) == expected


class Odd:
    """Data set whose attributes contradict its items."""

    _labels = (5, 5, 5)
    classes = ("same", "same")

    def __init__(self, *targets: Any) -> None:
        self.targets = "abc"
        self._given = targets

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, number: int) -> tuple[None, Any]:
        return None, self._given[number]


def test_classes_come_from_each_image_if_attributes_contradict_them() -> None:
    assert torchvision_set._targets(Odd(7, 10, 7), "Odd") == [7, 10, 7]
    assert torchvision_set._class_names(Odd(), 2) is None
    with pytest.raises(ValueError, match="torchvision's Odd gives dict with an image, not the number of a class"):
        torchvision_set._targets(Odd(1, {"box": 1}), "Odd")


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the download of MNIST locally; yield the list of requested paths."""
    import torchvision

    (tmp_path / "served").mkdir()
    resources, asked = [], list[str]()
    for name, data in mnist_files().items():
        (tmp_path / f"served/{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        resources.append((f"{name}.gz", hashlib.md5(gzip.compress(data, mtime=0)).hexdigest()))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *about: Any) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "served"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
        yield asked
        server.shutdown()


def test_downloads_happen_only_on_request(tmp_path: Path, mirror: list[str]) -> None:
    source: dict[str, Any] = {"type": "torchvision", "name": "MNIST", "path": str(tmp_path / "in")}
    with pytest.raises(ValueError, match=r"holds no files\. Put those of the set there, or set data\.source\.download"):
        list(parse(Source, source, "here").file_groups())
    with pytest.raises(ValueError, match=r"torchvision cannot open MNIST in .*: Dataset not found"):
        parse(Source, source, "here").listing()
    assert not mirror
    parsed = parse(Source, source | {"download": True}, "here")
    assert refresh(parsed, tmp_path / "source.json")  # before any file exists, as in Snakemake's first call
    assert set(crops_of(tmp_path / "crops", source | {"download": True})) == set(GREY)
    record_source(parsed, tmp_path / "source.json", parsed.file_groups(), {})
    assert len(mirror) >= 4 and not refresh(parsed, tmp_path / "source.json")


def test_unusable_torchvision_sets_are_reported_in_one_line(tmp_path: Path, mirror: list[str]) -> None:
    source: dict[str, Any] = {"type": "torchvision", "name": "MNIST", "path": str(tmp_path), "download": True}
    for change, message in (
        ({"options": {"split": "test"}}, r"unexpected keyword argument 'split'\. Put its files there"),
        ({"name": "FER2013"}, "unexpected keyword argument 'download'"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            parse(Source, source | change, "here").listing()
        assert "\n" not in str(error.value)
    for change, message in (({"options": {"root": "x"}}, "root cannot be set here"), ({"name": "VOC"}, "'VOC'|VOC")):
        with pytest.raises(ValueError, match=message):
            parse(Source, source | change, "here")


def test_every_name_is_a_set_of_torchvision() -> None:
    import torchvision

    assert all(hasattr(torchvision.datasets, name) for name in get_args(torchvision_set.Name))
