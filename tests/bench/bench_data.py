"""Crop, encode, write and read against others, interleaved in one process: ratios of medians of items a CPU-second.

    python tests/bench/bench_data.py --images photographs.tar [--peer DiT] [--peer fast-DiT] [--peer edm2]

A peer is a checkout; the functions named below are taken out of its files and run as they are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import resource
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import webdataset
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import sha256_file, write_json
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.order import epoch_order
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import (
    INDEX,
    Sample,
    ShardRecord,
    chunk_samples,
    describe_shards,
    index_of,
    read_index,
    write_index,
    write_shard,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.networks.autoencoder import AutoencoderConfig

Variant = Callable[[], int]
"""Does some work once and returns the number of items."""


def compare(title: str, variants: dict[str, Variant], rounds: int, on_gpu: bool = False) -> dict[str, float]:
    """Run every variant once to warm up, then all of them in turn; print and return items per CPU-second, or per second
    if a GPU does the work."""
    clock = time.perf_counter if on_gpu else cpu_seconds
    unit = "second" if on_gpu else "CPU-second"
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, variant in variants.items():
            before = clock()
            count = variant()
            rate = count / (clock() - before)
            if turn:
                rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first = next(iter(medians.values()))
    print(f"\n{title}")
    for name, rate in medians.items():
        spread = (max(rates[name]) - min(rates[name])) / rate
        print(f"  {name:<48}{rate:>12,.0f} a {unit}   ours / it {first / rate:>7.2f}   spread {spread:4.0%}")
    return medians


def cpu_seconds() -> float:
    """Return user and system time of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def function_of(path: Path, name: str) -> Callable[..., Any]:
    """Return one function or class of a peer's file, without importing the rest of it."""
    wanted = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    scope: dict[str, Any] = {"np": np, "Image": Image, "torch": torch, "os": os, "Dataset": torch.utils.data.Dataset}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def original_crop(image: Image.Image, size: int) -> np.ndarray:
    """Crop by the ADM formula, as guided-diffusion does."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), resample=Image.Resampling.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def bench_crop(photographs: list[bytes], peers: list[Path], folder: Path, rounds: int) -> None:
    config = DataConfig(name="x", source={"type": "digits"}, resolution=256)  # type: ignore[arg-type]
    (folder / "photographs").mkdir()
    for number, data in enumerate(photographs):
        (folder / f"photographs/{number:04d}.jpg").write_bytes(data)
    source = {"type": "folder", "path": str(folder / "photographs")}

    def ours() -> int:
        with quiet_pillow():
            for data in photographs:
                crop_image(data, config)
        return len(photographs)

    def plain(crop: Callable[[Image.Image, int], np.ndarray], png: bool) -> Variant:
        def run() -> int:
            for data in photographs:
                pixels = np.asarray(crop(Image.open(io.BytesIO(data)).convert("RGB"), 256))
                if png:
                    Image.fromarray(pixels).save(io.BytesIO(), "png")
            return len(photographs)

        return run

    def whole() -> int:
        settings = DataConfig.model_validate(config.model_dump() | {"source": source, "num_shards": 2})
        with tempfile.TemporaryDirectory(dir=folder) as output:
            crop_dataset(settings, Path(output))
        return len(photographs)

    def decode_only() -> int:
        for data in photographs:
            Image.open(io.BytesIO(data)).convert("RGB").load()
        return len(photographs)

    variants = {
        "ours: bytes to crop": ours,
        "the original formula": plain(original_crop, png=False),
        "the original formula, written as PNG": plain(original_crop, png=True),
        "decoding alone": decode_only,
    }
    for peer in peers:
        if (peer / "train.py").is_file() and "def center_crop_arr" in (peer / "train.py").read_text():
            crop = function_of(peer / "train.py", "center_crop_arr")
            variants[f"{peer.name}, center_crop_arr"] = plain(crop, png=False)
            variants[f"{peer.name}, center_crop_arr and PNG"] = plain(crop, png=True)
    compare("crop: JPEG bytes to a 256 x 256 crop", variants, rounds)

    stages: dict[str, Variant] = {"ours: folder to shards, hashed": whole}
    for peer in peers:
        if (peer / "dataset_tool.py").is_file():
            stages[f"{peer.name}, dataset_tool.py convert"] = dataset_tool(peer, folder, len(photographs))
    compare("crop: a folder of JPEGs to what training reads", stages, rounds)


def dataset_tool(peer: Path, folder: Path, count: int) -> Variant:
    """Run EDM2's command in this process, so that the start of Python is not part of it."""
    sys.path.insert(0, str(peer))
    command = importlib.import_module("dataset_tool").cmdline

    def run() -> int:
        with tempfile.TemporaryDirectory(dir=folder) as output, contextlib.redirect_stderr(io.StringIO()):
            arguments = ["convert", f"--source={folder / 'photographs'}", f"--dest={output}/out.zip"]
            arguments += ["--resolution=256x256", "--transform=center-crop-dhariwal"]
            command.main(args=arguments, standalone_mode=False)
        return count

    return run


def latents(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((count, 4, 32, 32), dtype=np.float32).astype(np.float16), np.arange(count) % 1000


def bench_encode(folder: Path, rounds: int, count: int = 128, resolution: int = 64) -> None:
    """Measure a small autoencoder with random weights; on a GPU, one of the size of Stable Diffusion's."""
    device = best_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        count, resolution = 1024, 256
    network = AutoencoderConfig(**(SD_SIZES if on_gpu else {})).build(DataSpec(channels=3, resolution=resolution))
    state = network.vae.eval().requires_grad_(False).state_dict()
    (folder / "noise").mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 256, (resolution, resolution, 3), dtype=np.uint8)
        header = f"P6 {resolution} {resolution} 255\n".encode()
        (folder / f"noise/{number:04d}.ppm").write_bytes(header + pixels.tobytes())
    source = {"type": "folder", "path": str(folder / "noise")}
    data = {"name": "x", "source": source, "resolution": resolution, "num_shards": 2}
    crop_dataset(DataConfig.model_validate(data), folder / "crops")
    crops = open_shards(folder / "crops", "all")

    def codec(dtype: torch.dtype) -> KlCodec:
        vae = AutoencoderKL.from_config(network.vae.config)
        vae.load_state_dict(state)
        vae = vae.to(device, dtype).eval().requires_grad_(False)
        return KlCodec({"type": "kl", "weights": "random"}, lambda: vae, 1.0)

    def ours(**settings: Any) -> Variant:
        chosen = EncodeConfig(**settings)
        made = codec(chosen.compute_dtype)

        def run() -> int:
            with tempfile.TemporaryDirectory(dir=folder) as output:
                encode_shards(folder / "crops", Path(output), made, chosen, device)
            return 2 * count

        return run

    def one_at_a_time() -> int:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            for number in range(count):
                moments = single.encode(crops.gather(np.array([number])))
                np.save(f"{output}/{number}.npy", moments[:, 0].cpu().numpy())
                np.save(f"{output}/{number}-label.npy", np.zeros(1, dtype=np.int64))
        return count

    single = codec(torch.float32)
    variants = {
        "ours, float32, batches of 32": ours(),
        "ours, bf16, batches of 32": ours(precision="bf16"),
        "ours, float32, batches of 1": ours(batch_size=1),
        "one image at a time into two files, as fast-DiT": one_at_a_time,
    }
    compare(f"encode: crops of {resolution} x {resolution} on {device}, latents to disk", variants, rounds, on_gpu)


SD_SIZES: dict[str, Any] = {"block_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_groups": 32}
LAYOUT = Layout(("npy",), (4, 32, 32), "float16", labelled=True)


def bench_write(folder: Path, rounds: int, count: int = 10_000) -> None:
    arrays, labels = latents(count)

    def ours() -> int:
        size = chunk_samples(LAYOUT)
        chunks = (({"npy": arrays[i : i + size]}, labels[i : i + size]) for i in range(0, count, size))
        write_shard(folder, 0, LAYOUT, chunks)
        return count

    def theirs() -> int:
        with webdataset.ShardWriter(str(folder / "theirs-%05d.tar"), maxcount=count + 1, mtime=0, verbose=0) as writer:
            for i in range(count):
                writer.write({"__key__": f"00000-{i:06d}", "npy": arrays[i], "cls": int(labels[i])})
        return count

    variants = {"webdataset's TarWriter, hashed and flushed to disk": ours, "ShardWriter(mtime=0)": theirs}
    compare("write: latents of 4 x 32 x 32, float16", variants, rounds)
    same = (folder / "shard-00000.tar").read_bytes() == (folder / "theirs-00000.tar").read_bytes()
    print(f"  byte-identical: {same}")


def make_set(folder: Path, arrays: np.ndarray, labels: np.ndarray, num_shards: int) -> Path:
    """Write latents as a set of shards, with the records and the manifest that reading needs."""
    bounds = np.linspace(0, len(labels), num_shards + 1).astype(int)
    records = []
    for shard in range(num_shards):
        rows = slice(bounds[shard], bounds[shard + 1])
        sha256, size, count = write_shard(folder, shard, LAYOUT, [({"npy": arrays[rows]}, labels[rows])])
        samples = [Sample("", "", "f" * 64, int(label), (0, 0), []) for label in labels[rows]]
        records.append(ShardRecord(shard, "", sha256, size, count, {}, samples, {}))
    write_index(folder / "index.npy", map(index_of, records))
    described = describe_shards(LAYOUT, records)
    classes = [str(number) for number in range(1000)]
    manifest = {"format": 1, "kind": "crops", "name": "x", "classes": classes, "validation_fraction": 0.0, **described}
    manifest["index"] = sha256_file(folder / "index.npy")
    write_json(folder / "manifest.json", manifest)
    return folder


def bench_read(folder: Path, rounds: int, count: int = 50_000, batch: int = 256) -> None:
    arrays, labels = latents(count)
    ten, many = make_set(folder / "10", arrays, labels, 10), make_set(folder / "250", arrays, labels, 250)
    memory = torch.from_numpy(arrays)
    urls = [str(path) for path in sorted(ten.glob("*.tar"))]
    turn = iter(range(10**9))

    def gather(dataset: Any) -> Variant:
        buffer = torch.empty((batch, 4, 32, 32), dtype=torch.float16)

        def run() -> int:
            order = epoch_order(count, 0, next(turn))
            for start in range(0, count, batch):
                dataset.gather(order[start : start + batch], out=buffer)
            return count

        return run

    def batches() -> int:
        return sum(len(each.label) for each in Batches(open_shards(ten), batch, next(turn), epochs=1))

    def in_memory() -> int:
        order = torch.from_numpy(epoch_order(count, 0, next(turn)))
        for start in range(0, count, batch):
            memory[order[start : start + batch]]
        return count

    twin = torch.empty_like(memory)

    def copy() -> int:
        twin.copy_(memory)
        return count

    def standard() -> int:
        stream = webdataset.WebDataset(urls, shardshuffle=10).shuffle(1000).decode()
        stream = stream.to_tuple("npy", "cls").batched(batch)
        seen = 0
        for _, found in stream:
            seen += len(found)
            if seen >= 8_000:
                break
        return seen

    variants = {
        "ours, 10 shards, exact global shuffle": gather(open_shards(ten)),
        "ours, 250 shards": gather(open_shards(many)),
        "ours, held in memory": gather(open_shards(ten).hold()),
        "ours, Batches with its thread, opening included": batches,
        "gather from a tensor in memory": in_memory,
        "memcpy": copy,
        "webdataset, shuffle(1000), same files": standard,
    }
    compare("read: latents of 4 x 32 x 32, float16, batches of 256", variants, rounds)


def bench_start(folder: Path) -> None:
    """Measure the time until the first batch, and until the index of ImageNet is loaded."""
    index = np.zeros(1_281_167, dtype=INDEX)
    np.save(folder / "index.npy", index)
    started = time.perf_counter()
    read_index(folder / "index.npy")
    loaded = time.perf_counter() - started
    started = time.perf_counter()
    epoch_order(len(index), 0, 5)
    ordered = time.perf_counter() - started
    dataset = open_shards(folder / "10")
    first = []
    for start in (0, 24_000, 10**9 + 7):
        started = time.perf_counter()
        stream = iter(Batches(dataset, 256, 0, start=start))
        next(stream)
        first.append(time.perf_counter() - started)
        stream.close()  # type: ignore[attr-defined]
    state = len(json.dumps({"examples_seen": 10**9 + 7, "seed": 2**63, "digest": "f" * 64}))
    print("\nstart")
    print(f"  index of 1.28 million samples {loaded:.3f} s, their order in an epoch {ordered:.3f} s")
    times = ", ".join(f"{each:.3f}" for each in first)
    print(f"  first batch from positions 0, 24,000, 10^9: {times} s; state of {state} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a tar of JPEGs; without it nothing is cropped")
    parser.add_argument("--peer", type=Path, action="append", default=[], help="checkout of DiT, fast-DiT or EDM2")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.images:
            with tarfile.open(arguments.images) as tar:
                files = [tar.extractfile(member) for member in tar if member.isfile()]
                photographs = [file.read() for file in files if file is not None]
            bench_crop(photographs, [peer.resolve() for peer in arguments.peer], folder, arguments.rounds)
        bench_encode(folder, arguments.rounds)
        bench_write(folder, arguments.rounds)
        bench_read(folder, arguments.rounds)
        bench_start(folder)


if __name__ == "__main__":
    main()
