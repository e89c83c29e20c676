"""Crops -> latents: stored shards, statistics, reuse of shards, and rejected input."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from torch import Tensor

from image_diffusion.core.files.atomic import write_json
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded import latents as encoding
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.records import Chunk, read_record, write_shard

CPU = torch.device("cpu")
LIMIT_S = 10.0


class Halves:
    """A codec of exact arithmetic: two channels of the image's left-out pixels as mean, a ramp as deviation."""

    def __init__(self, name: str = "halves", scale: float = 1.0, poison: int | None = None) -> None:
        self.identity: dict[str, Any] = {"name": name, "scale": scale}
        self.scale, self.poison, self.seen = scale, poison, 0

    def encode(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        mean = images[:, :2, ::2, ::2].float() / 256 * self.scale
        std = torch.linspace(0.25, 1.0, mean[0].numel()).view(mean.shape[1:]).expand_as(mean)
        moments = torch.stack([mean, std], dim=1)
        self.seen += len(images)
        if self.poison is not None and self.seen >= self.poison:
            moments[-1, 0, 0, 0, 0] = float("nan")
        return moments


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def crops(tmp_path: Path) -> Callable[[], Path]:
    generator = np.random.default_rng(0)
    for number in range(23):
        path = tmp_path / f"in/{'ab'[number % 2]}/{number:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 4 4 255\n" + generator.integers(0, 256, 48, dtype=np.uint8).tobytes())

    def run() -> Path:
        source = {"type": "folder", "path": str(tmp_path / "in")}
        crop_dataset(DataConfig(name="x", source=source, resolution=4, num_shards=3), tmp_path / "crops")  # type: ignore[arg-type]
        return tmp_path / "crops"

    run()
    return run


def encode(crops: Path, output: Path, codec: Halves | None = None, **settings: Any) -> int:
    codec, chosen = codec or Halves(), EncodeConfig(**({"batch_size": 4} | settings))
    written = encode_shards(crops, output, codec, chosen, CPU)
    write_manifest(crops, output, codec, chosen)
    return written


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shards_hold_every_image_and_its_mirror_image(tmp_path: Path, crops: Callable[[], Path], dtype: str) -> None:
    assert encode(tmp_path / "crops", tmp_path / "out", dtype=dtype) == 3
    images = open_shards(tmp_path / "crops", "all")
    latents = open_shards(tmp_path / "out", "all", in_background=True)
    everything = np.arange(23)
    assert (latents.shape, latents.num_samples) == ((2, 2, 2, 2), 23)
    assert latents.classes == ["a", "b"] and (latents.labels == images.labels).all()
    plain, flip = images.gather(everything), np.ones(23, dtype=bool)
    stored = getattr(torch, dtype)
    assert torch.equal(latents.gather(everything), Halves().encode(plain).to(stored))
    assert torch.equal(latents.gather(everything, flip), Halves().encode(plain.flip(-1)).to(stored))
    assert latents.manifest["crops"] == images.digest
    assert [sample for shard in range(3) for sample in read_record(tmp_path / "out", shard).samples] == [
        sample for shard in range(3) for sample in read_record(tmp_path / "crops", shard).samples
    ]


def test_webdataset_reads_latent_shards(tmp_path: Path, crops: Callable[[], Path]) -> None:
    encode(tmp_path / "crops", tmp_path / "out")
    latents = open_shards(tmp_path / "out", "all")
    urls = [str(tmp_path / f"out/shard-{shard:05d}.tar") for shard in range(3)]
    count = 0
    for plain, twin, label in (
        webdataset.WebDataset(urls, shardshuffle=False).decode().to_tuple("npy", "flip.npy", "cls")
    ):
        here = np.array([count])
        assert (latents.gather(here)[0].numpy() == plain).all() and latents.labels[count] == label
        assert (latents.gather(here, np.array([True]))[0].numpy() == twin).all()
        count += 1
    assert count == 23


def test_statistics_match_the_stored_latents(tmp_path: Path, crops: Callable[[], Path]) -> None:
    encode(tmp_path / "crops", tmp_path / "out")
    latents = open_shards(tmp_path / "out", "all")
    everything = np.arange(23)
    both = torch.cat([latents.gather(everything), latents.gather(everything, np.ones(23, dtype=bool))]).double()
    mean, std = both[:, 0], both[:, 1]
    found = latents.manifest["statistics"]
    for channel in range(2):
        expected_mean = mean[:, channel].mean()
        expected_std = (mean[:, channel].var(correction=0) + (std[:, channel] ** 2).mean()).sqrt()
        assert found["mean"][channel] == pytest.approx(float(expected_mean), rel=1e-12)
        assert found["std"][channel] == pytest.approx(float(expected_std), rel=1e-12)
    assert found["global_mean"] == pytest.approx(float(mean.mean()), rel=1e-12)
    expected = (mean.var(correction=0) + (std**2).mean()).sqrt()
    assert found["global_std"] == pytest.approx(float(expected), rel=1e-12)


def test_parts_in_any_order_equal_a_single_run(
    tmp_path: Path, crops: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encode(tmp_path / "crops", tmp_path / "one")
    settings = EncodeConfig(batch_size=4)
    for part in ((1, 2), (0, 2)):
        with pytest.raises(ValueError, match=r"shard-0000\d.json does not exist"):
            write_manifest(tmp_path / "crops", tmp_path / "two", Halves(), settings)
        encode_shards(tmp_path / "crops", tmp_path / "two", Halves(), settings, CPU, part)
    write_manifest(tmp_path / "crops", tmp_path / "two", Halves(), settings)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert encode(tmp_path / "crops", tmp_path / "two") == 0
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert capsys.readouterr().err.count(" images (100%)") == 4  # kept images are counted as well


def test_changed_image_re_encodes_one_shard_and_changed_codec_all(tmp_path: Path, crops: Callable[[], Path]) -> None:
    encode(tmp_path / "crops", tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    image = tmp_path / "in/a/04.ppm"
    image.write_bytes(image.read_bytes()[:11] + b"\0" + image.read_bytes()[12:])
    settings = EncodeConfig(batch_size=4)
    crops()
    with pytest.raises(ValueError, match="was made from other crops or by another codec"):
        write_manifest(tmp_path / "crops", tmp_path / "out", Halves(), settings)
    assert encode(tmp_path / "crops", tmp_path / "out") == 1
    changed = {name for name, data in bytes_of(tmp_path / "out").items() if data != before[name]}
    assert len([name for name in changed if name.endswith(".tar")]) == 1
    assert encode(tmp_path / "crops", tmp_path / "out", Halves(scale=2.0)) == 3
    assert encode(tmp_path / "crops", tmp_path / "out", Halves(scale=2.0), dtype="float32") == 3
    assert encode(tmp_path / "crops", tmp_path / "out", Halves(scale=2.0), dtype="float32", batch_size=3) == 0
    assert encode(tmp_path / "crops", tmp_path / "out", Halves(scale=2.0), dtype="float32", precision="bf16") == 3


def test_resaved_images_with_equal_pixels_change_ids_but_encode_nothing(
    tmp_path: Path, crops: Callable[[], Path]
) -> None:
    encode(tmp_path / "crops", tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    for image in (tmp_path / "in/a").iterdir():
        image.write_bytes(image.read_bytes().replace(b"P6 ", b"P6 # x\n", 1))
    crops()
    with pytest.raises(ValueError, match="was made from other crops or by another codec"):
        write_manifest(tmp_path / "crops", tmp_path / "out", Halves(), EncodeConfig(batch_size=4))
    assert encode(tmp_path / "crops", tmp_path / "out") == 0
    after = bytes_of(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} >= {"index.npy", "shard-00000.json"}
    images, latents = open_shards(tmp_path / "crops", "all"), open_shards(tmp_path / "out", "all")
    assert latents.join(images).num_samples == 23
    assert all(before[name] == after[name] for name in before if name.endswith(".tar"))


def test_non_finite_latents_are_rejected_with_the_image_name(tmp_path: Path, crops: Callable[[], Path]) -> None:
    with pytest.raises(ValueError, match=r"not finite, or too large for float16, for [ab]/\d\d.ppm \(sample 0000"):
        encode(tmp_path / "crops", tmp_path / "out", Halves(poison=1))
    with pytest.raises(ValueError, match="not finite, or too large for float16"):
        encode(tmp_path / "crops", tmp_path / "out", Halves(scale=1e6))
    assert not list((tmp_path / "out").glob("*.tar"))
    assert encode(tmp_path / "crops", tmp_path / "out", Halves(scale=1e6), dtype="float32") == 3


def test_a_damaged_crop_is_not_encoded(tmp_path: Path, crops: Callable[[], Path]) -> None:
    tar = tmp_path / "crops/shard-00001.tar"
    data = bytearray(tar.read_bytes())
    data[1700] ^= 1
    tar.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00001\.tar is damaged: its sha256 .* Run crop again"):
        encode(tmp_path / "crops", tmp_path / "out")


def test_empty_shards_and_missing_classes_are_supported(tmp_path: Path, crops: Callable[[], Path]) -> None:
    shutil.rmtree(tmp_path / "in/b")
    for number, path in enumerate(sorted((tmp_path / "in/a").iterdir())):
        if number >= 2:
            path.unlink()
        else:
            path.rename(tmp_path / "in" / path.name)
    (tmp_path / "in/a").rmdir()
    crops()
    assert encode(tmp_path / "crops", tmp_path / "out") == 3
    latents = open_shards(tmp_path / "out", "all", in_background=True)
    assert latents.num_samples == 2 and latents.num_classes == 0
    write_json(tmp_path / "unused.json", latents.manifest)  # plain data, no NaN


class Stages:
    """Reading, encoding and writing of a set's single shard, in batches of `size`. Each stage sets an event when it
    begins a batch, then calls a hook. asked: chunks that the writer has requested."""

    def __init__(self, patch: pytest.MonkeyPatch, num_batches: int, size: int) -> None:
        names = "read", "encoded", "written"
        self.begun = {name: [threading.Event() for _ in range(num_batches)] for name in names}
        self.then: dict[str, Callable[[int], None]] = dict.fromkeys(names, lambda batch: None)
        self.asked = 0
        gather, stages = Shards.gather, self

        def read(shards: Shards, indices: Any, *rest: Any) -> Tensor:
            stages._begin("read", int(indices[0]) // size)
            return gather(shards, indices, *rest)

        class Codec(Halves):
            def encode(self, images: Tensor) -> Tensor:
                stages._begin("encoded", self.seen // (2 * size))  # each batch is encoded twice: plain and mirrored
                return super().encode(images)

        def write(folder: Path, shard: int, layout: Any, chunks: Iterable[Chunk]) -> Any:
            return write_shard(folder, shard, layout, written(iter(chunks)))

        def written(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            for batch in range(num_batches):
                self.asked += 1
                chunk = next(chunks)
                self._begin("written", batch)
                yield chunk

        patch.setattr(Shards, "gather", read)
        patch.setattr(encoding, "write_shard", write)
        self.codec = Codec()

    def _begin(self, name: str, batch: int) -> None:
        self.begun[name][batch].set()
        self.then[name](batch)

    def wait(self, name: str, batch: int) -> None:
        """Wait until a stage begins a batch; returns at once for the batch after the last one."""
        if batch < len(self.begun[name]):
            assert self.begun[name][batch].wait(LIMIT_S), f"batch {batch} is not {name} meanwhile"


@pytest.fixture
def stages(tmp_path: Path, crops: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Stages:
    source = {"type": "folder", "path": str(tmp_path / "in")}
    crop_dataset(DataConfig(name="x", source=source, resolution=4, num_shards=1), tmp_path / "one")  # type: ignore[arg-type]
    encode(tmp_path / "one", tmp_path / "usual")
    return Stages(monkeypatch, num_batches=6, size=4)


def test_reading_encoding_and_writing_of_batches_overlap(tmp_path: Path, stages: Stages) -> None:
    stages.then["encoded"] = lambda batch: stages.wait("read", batch + 1)
    stages.then["written"] = lambda batch: stages.wait("encoded", batch + 1)
    encode(tmp_path / "one", tmp_path / "out", stages.codec)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "usual")


def test_at_most_three_batches_are_in_flight(tmp_path: Path, stages: Stages) -> None:
    ahead: list[int] = []
    stages.then["read"] = lambda batch: ahead.append(batch + 1 - stages.asked)
    encode(tmp_path / "one", tmp_path / "out", stages.codec)
    assert len(ahead) == 6 and max(ahead) <= 3


def fail(error: BaseException) -> Callable[[int], None]:
    def at(batch: int) -> None:
        if batch == 3:
            raise error

    return at


@pytest.mark.parametrize("stage", ["read", "encoded", "written"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_any_stage_stops_all_threads(
    tmp_path: Path, stages: Stages, stage: str, error: type[BaseException]
) -> None:
    stages.then[stage] = fail(error("what went wrong"))
    before = threading.active_count()
    with pytest.raises(error, match="what went wrong"):
        encode(tmp_path / "one", tmp_path / "out", stages.codec)
    assert threading.active_count() == before
    assert not list((tmp_path / "out").iterdir())


def test_signal_stops_all_threads(tmp_path: Path, stages: Stages) -> None:
    stages.then["read"] = lambda batch: os.kill(os.getpid(), signal.SIGINT) if batch == 3 else None
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        encode(tmp_path / "one", tmp_path / "out", stages.codec)
    assert threading.active_count() == before


class Tokens(Halves):
    """A discrete codec of exact arithmetic: 300 tokens, from the pixels that `Halves` does not use."""

    num_tokens = 300

    def encode(self, images: Tensor) -> Tensor:
        return images[:, 0, ::2, ::2].long() + images[:, 1, ::2, ::2].long() % 45


def test_discrete_codec_stores_integers_and_token_counts(tmp_path: Path, crops: Callable[[], Path]) -> None:
    assert encode(tmp_path / "crops", tmp_path / "out", Tokens()) == 3
    images, tokens = open_shards(tmp_path / "crops", "all"), open_shards(tmp_path / "out", "all", in_background=True)
    everything, flip = np.arange(23), np.ones(23, dtype=bool)
    plain = images.gather(everything)
    assert tokens.dtype == torch.int16 and tokens.shape == (2, 2)
    stored, mirrored = tokens.gather(everything), tokens.gather(everything, flip)
    assert torch.equal(stored.long(), Tokens().encode(plain))
    assert torch.equal(mirrored.long(), Tokens().encode(plain.flip(-1)))
    manifest = tokens.manifest
    assert (manifest["kind"], manifest["num_tokens"], manifest["dtype"]) == ("tokens", 300, "int16")
    both = torch.cat([stored, mirrored]).long().flatten()
    assert manifest["token_counts"] == both.bincount(minlength=300).tolist()
    url = str(tmp_path / "out/shard-00000.tar")
    array, label = next(iter(webdataset.WebDataset(url, shardshuffle=False).decode().to_tuple("npy", "cls")))
    assert array.dtype == np.int16 and (array == stored[0].numpy()).all() and label == tokens.labels[0]
    Tokens.num_tokens = 2**15 + 1
    try:
        assert encode(tmp_path / "crops", tmp_path / "out", Tokens()) == 3
        assert open_shards(tmp_path / "out", "all").dtype == torch.int32
    finally:
        Tokens.num_tokens = 300
