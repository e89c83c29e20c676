"""Shards behind a URL give the batches of local shards; each shard is fetched once and verified."""

import hashlib
import http.server
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_diffusion.core.files import store
from image_diffusion.core.files.atomic import read_json
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards import remote
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.remote import folder_of, place
from image_diffusion.stages import train

NUM_SHARDS = 5


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of 40 images in two classes, a fifth of them for validation."""
    folder = tmp_path_factory.mktemp("crops")
    generator = np.random.default_rng(0)
    for number in range(40):
        path = folder / f"in/{'ab'[number % 2]}/{number:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 4 4 255\n" + generator.integers(0, 256, 48, dtype=np.uint8).tobytes())
    source = {"type": "folder", "path": str(folder / "in")}
    settings = {"name": "x", "source": source, "resolution": 4, "num_shards": NUM_SHARDS, "validation_fraction": 0.2}
    crop_dataset(DataConfig.model_validate(settings), folder / "out")
    return folder / "out"


class Server:
    """Web server of a folder. url: its address. fetched: how often each file was sent. damage: functions that change a
    file's bytes. failures: how many requests for a file fail first."""

    def __init__(self, folder: Path) -> None:
        self.fetched: Counter[str] = Counter()
        self.damage: dict[str, Callable[[bytes], bytes]] = {}
        self.failures: Counter[str] = Counter()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(send=False)

            def do_GET(self) -> None:
                self.answer(send=True)

            def answer(self, send: bool) -> None:
                name = self.path.removeprefix("/set/")
                path = folder / name
                if not path.is_file():
                    self.send_error(404)
                    return
                if send and outer.failures[name]:
                    outer.failures[name] -= 1
                    self.send_error(503)
                    return
                data = outer.damage.get(name, bytes)(path.read_bytes())
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if send:
                    outer.fetched[name] += 1
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                """Keep the test's output clean."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/set"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def shards(self) -> dict[str, int]:
        """How often each shard was sent."""
        return {name: count for name, count in self.fetched.items() if name.endswith(".tar")}


@pytest.fixture
def server(crops: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(store, "_WAITS_S", (0.0, 0.0))
    server = Server(crops)
    yield server
    server.server.shutdown()
    server.server.server_close()


EACH_ONCE = {f"shard-{shard:05d}.tar": 1 for shard in range(NUM_SHARDS)}


def test_remote_batches_equal_local_batches(tmp_path: Path, crops: Path, server: Server) -> None:
    here, there = open_shards(crops), open_shards(server.url, cache=tmp_path)
    assert there.digest == here.digest and (there.labels == here.labels).all() and not server.shards
    mine, theirs = (Batches(each, 8, seed=3, flip_probability=0.5, epochs=3) for each in (here, there))
    count = 0
    for one, other in zip(mine, theirs, strict=True):
        for name in ("stored", "label", "epoch", "sample"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        count += len(one.label)
    assert count == 3 * here.num_samples and server.shards == EACH_ONCE


def test_shard_is_fetched_at_first_read_and_cached(tmp_path: Path, crops: Path, server: Server) -> None:
    here, there = open_shards(crops, "all"), open_shards(server.url, "all", cache=tmp_path)
    for number in (0, 39, 1, 38):
        assert torch.equal(there.gather(np.array([number])), here.gather(np.array([number])))
    assert server.shards == {"shard-00000.tar": 1, "shard-00004.tar": 1}
    held = open_shards(server.url, "all", cache=tmp_path).hold()
    assert torch.equal(held.gather(np.arange(40)), here.gather(np.arange(40))) and server.shards == EACH_ONCE
    expected = {each["sha256"] for each in here.manifest["shards"]} | {here.manifest["index"]}
    kept = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert {path.name for path in kept} == expected
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in kept)


def test_training_resumes_from_the_cache(tmp_path: Path, crops: Path, server: Server) -> None:
    whole = list(islice(Batches(open_shards(crops), 8, seed=3), 12))
    list(islice(Batches(open_shards(server.url, cache=tmp_path), 8, seed=3), 6))
    assert server.shards == EACH_ONCE
    rest = Batches(open_shards(server.url, cache=tmp_path), 8, seed=3, start=48)
    for one, other in zip(whole[6:], rest, strict=False):
        assert torch.equal(one.stored, other.stored) and torch.equal(one.sample, other.sample)
    assert server.shards == EACH_ONCE and server.fetched["index.npy"] == 1


def test_concurrent_readers_fetch_each_shard_once(tmp_path: Path, crops: Path, server: Server) -> None:
    here = open_shards(crops, "all")
    with ThreadPoolExecutor(4) as pool:
        sets = pool.map(lambda _: open_shards(server.url, "all", cache=tmp_path).hold(), range(4))
        assert all(torch.equal(each.gather(np.arange(40)), here.gather(np.arange(40))) for each in sets)
    assert server.shards == EACH_ONCE


@pytest.mark.parametrize("damage", [lambda data: data[:700] + b"\x01" + data[701:], lambda data: data[:-512]])
def test_damaged_download_is_rejected_and_not_cached(
    tmp_path: Path, server: Server, damage: Callable[[bytes], bytes]
) -> None:
    there = open_shards(server.url, "all", cache=tmp_path)
    server.damage["shard-00000.tar"] = damage
    with pytest.raises(ValueError, match=r"shard-00000\.tar cannot be fetched: the download is damaged") as error:
        there.gather(np.arange(1))
    assert "\n" not in str(error.value) and server.shards == {"shard-00000.tar": 3}
    assert there.manifest["shards"][0]["sha256"] not in {path.name for path in tmp_path.iterdir()}
    server.damage.clear()
    assert there.gather(np.arange(1)).any()


def test_failed_connections_are_retried(tmp_path: Path, crops: Path, server: Server) -> None:
    there = open_shards(server.url, "all", cache=tmp_path)
    server.failures["shard-00001.tar"] = 2
    assert torch.equal(there.gather(np.arange(40)), open_shards(crops, "all").gather(np.arange(40)))
    assert server.shards == EACH_ONCE
    server.failures["manifest.json"] = 3
    with pytest.raises(ValueError, match=r"manifest\.json cannot be fetched: 503"):
        open_shards(server.url, cache=tmp_path)


def test_damaged_cache_is_fetched_again(tmp_path: Path, crops: Path, server: Server) -> None:
    here = open_shards(crops, "all")
    open_shards(server.url, "all", cache=tmp_path).hold()
    short, flipped = (tmp_path / here.manifest["shards"][shard]["sha256"] for shard in (1, 2))
    short.write_bytes(short.read_bytes()[:-1])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x01")
    (tmp_path / here.manifest["index"]).write_bytes(b"\x93NUMPY")
    found = open_shards(server.url, "all", cache=tmp_path).hold()
    assert torch.equal(found.gather(np.arange(40)), here.gather(np.arange(40)))
    assert server.shards == EACH_ONCE | {"shard-00001.tar": 2, "shard-00002.tar": 2}
    assert server.fetched["index.npy"] == 2


def test_unreadable_urls_and_manifests_are_reported_in_one_line(
    tmp_path: Path, crops: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url, message in (
        (server.url + "/nowhere", r"nowhere/manifest\.json cannot be fetched: there is no such file\. Check"),
        ("s3://bucket/set", r"s3://bucket/set/manifest\.json cannot be fetched: .*s3fs"),
        ("nonsense://x", r"cannot be fetched: .*nonsense"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            open_shards(url, cache=tmp_path)
        assert "\n" not in str(error.value)
    manifest = read_json(crops / "manifest.json")
    for change, message in (
        ({"format": 99}, "is not of format 1"),
        ({"index": "../../outside"}, "index is '../../outside'"),
    ):
        server.damage["manifest.json"] = partial(lambda change, data: json.dumps(manifest | change).encode(), change)
        with pytest.raises(ValueError, match=message):
            open_shards(server.url, cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["carried", "files", "shards"])
@pytest.mark.parametrize("absolute", [True, False])
def test_manifest_paths_cannot_write_outside_the_results_folder(
    tmp_path: Path, crops: Path, server: Server, monkeypatch: pytest.MonkeyPatch, key: str, absolute: bool
) -> None:
    victim = tmp_path / "home" / ".bashrc"
    victim.parent.mkdir()
    victim.write_text("mine\n")
    name, manifest = str(victim) if absolute else "../home/.bashrc", read_json(crops / "manifest.json")
    stated = manifest["shards"][0]["sha256"]
    change: dict[str, Any] = {key: manifest.get(key, {}) | {name: stated}} if key != "shards" else {}
    if key == "shards":
        change = {key: [manifest[key][0] | {"file": name}, *manifest[key][1:]]}
    server.damage["manifest.json"] = lambda data: json.dumps(manifest | change).encode()
    monkeypatch.setenv("IMAGE_DIFFUSION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.yaml").write_text(TRAIN)
    output = tmp_path / "out" / "weights.safetensors"
    data = f"{server.url}/manifest.json"
    monkeypatch.setattr(
        sys, "argv", ["train", f"--config={tmp_path}/train.yaml", f"--data={data}", f"--output={output}"]
    )
    with pytest.raises(ValueError, match=r"should match pattern") as error:
        train.main()
    assert "\n" not in str(error.value) and data in str(error.value)
    assert victim.read_text() == "mine\n" and set(server.fetched) == {"manifest.json"}
    assert {path.name for path in tmp_path.rglob("*")} == {"home", ".bashrc", "train.yaml"}


def test_any_fsspec_protocol_is_supported(tmp_path: Path, crops: Path) -> None:
    here, there = open_shards(crops, "all"), open_shards(f"file://{crops}", "all", cache=tmp_path)
    assert torch.equal(there.gather(np.arange(40)), here.gather(np.arange(40)))


def test_commands_take_paths_and_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder_of(place("https://a.b/c/manifest.json")) == "https://a.b/c"
    assert folder_of(place("results/c/manifest.json")) == Path("results/c")
    monkeypatch.setenv("IMAGE_DIFFUSION_CACHE", str(tmp_path))
    assert remote.cache_folder() == tmp_path
    monkeypatch.delenv("IMAGE_DIFFUSION_CACHE")
    assert remote.cache_folder() == Path.home() / ".cache/image-diffusion"


TRAIN = """
experiment: remote
codec: {type: rgb}
system:
  type: dit
  network: {patch: 2, width: 8, depth: 1, num_heads: 1}
train: {steps: 3, global_batch: 8, validate_every_steps: 3, grid_every_steps: null}
preview: {}
"""


def test_training_from_a_url_gives_the_weights_of_training_from_a_path(
    tmp_path: Path, crops: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    monkeypatch.setenv("IMAGE_DIFFUSION_CACHE", str(tmp_path / "cache"))
    weights = []
    for name, data in (("here", f"{crops}/manifest.json"), ("there", f"{server.url}/manifest.json")):
        output = tmp_path / name / "weights.safetensors"
        arguments = ["--config", str(tmp_path / "train.yaml"), "--data", data, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        train.main()
        weights.append(output.read_bytes())
    assert weights[0] == weights[1] and server.shards == EACH_ONCE
