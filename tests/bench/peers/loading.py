"""One reader on one kind of data: what `make peers` runs, each in a process of its own, in turn with the others.

    python tests/bench/peers/loading.py latents litdata FOLDER

Prints one line of JSON: samples a CPU second of a shuffled epoch, seconds from opening to the first batch, seconds from
opening in the middle of an epoch to the next batch, and the memory that reading adds. FOLDER holds the data in every
reader's own format; what is absent is written first, and that is not measured but for `ours` on photographs, whose
preparation is the decoding that the others do in each epoch.

All readers use one process and no workers; those that cannot work without a thread use one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2
from usage import cpu_seconds, peak_mib

BATCH = {"latents": 256, "photographs": 32}
COUNT = {"latents": 20_000, "photographs": 600}
SHAPE, SIDE, SEED = (4, 32, 32), 256, 0

Batches = Iterator[Any]
"""Pairs of samples and classes, each [B, …]."""


@dataclass
class Reader:
    """prepare: writes the format into a folder. open: takes that folder, and the state of a reader or None; returns the
    batches of an epoch from there on, and what returns the state, or None where there is none. is_work: the preparation
    is what the others do while they read, and counts as part of the first epoch."""

    prepare: Callable[[Path], None]
    open: Callable[[Path, Any], tuple[Batches, Callable[[], Any] | None]]
    is_work: bool = False


def stored_latents() -> tuple[np.ndarray, np.ndarray]:
    """Latents of 4 x 32 x 32 in float16, and a thousand classes."""
    generator, count = np.random.default_rng(0), COUNT["latents"]
    return generator.standard_normal((count, *SHAPE), dtype=np.float32).astype(np.float16), np.arange(count) % 1000


def photographs(folder: Path) -> list[Path]:
    """JPEGs of 500 x 375 with the spectrum of photographs (amplitude as 1/frequency), in ten classes; written once."""
    root = folder / "photographs"
    if not root.is_dir():
        generator = np.random.default_rng(0)
        frequency = np.hypot(np.fft.fftfreq(375)[:, None], np.fft.rfftfreq(500)[None])
        frequency[0, 0] = np.inf
        for number in range(COUNT["photographs"]):
            noise = np.fft.rfft2(generator.standard_normal((3, 375, 500))) / frequency
            pixels = np.fft.irfft2(noise, (375, 500)).transpose(1, 2, 0)
            pixels = 127 + 50 * pixels / pixels.std()
            path = root / f"{number % 10}" / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return sorted(root.rglob("*.jpg"))


def samples(kind: str, folder: Path) -> Iterator[tuple[Any, int]]:
    """The array or the bytes of each file, and its class."""
    if kind == "latents":
        yield from ((array, int(label)) for array, label in zip(*stored_latents(), strict=True))
    else:
        yield from ((path.read_bytes(), int(path.parent.name)) for path in photographs(folder))


def decoded(data: bytes) -> torch.Tensor:
    """A photograph as most trainings read it: torchvision's resize and centre crop of Pillow's image."""
    with Image.open(io.BytesIO(data)) as image:
        return v2.functional.pil_to_tensor(v2.functional.center_crop(v2.functional.resize(image, [SIDE]), [SIDE]))


def collated(rows: list[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of arrays and classes."""
    arrays = [row if isinstance(row, torch.Tensor) else torch.from_numpy(np.asarray(row)) for row, _ in rows]
    return torch.stack(arrays), torch.tensor([int(label) for _, label in rows])


# ---- image-diffusion


def ours(kind: str) -> Reader:
    from bench_data import make_set

    from image_diffusion.data.config import DataConfig
    from image_diffusion.data.cropped.dataset import crop_dataset
    from image_diffusion.data.shards.loader import Batches as Loader
    from image_diffusion.data.shards.reader import open_shards

    def prepare(folder: Path) -> None:
        if kind == "latents":
            folder.mkdir()
            make_set(folder, *stored_latents(), 10)
        else:
            source = {"type": "folder", "path": str(folder.parent / "photographs")}
            data = {"name": "x", "source": source, "resolution": SIDE, "num_shards": 2}
            crop_dataset(DataConfig.model_validate(data), folder)

    def open_(folder: Path, state: Any) -> tuple[Batches, Callable[[], int]]:
        start = seen = state or 0

        def batches() -> Batches:
            nonlocal seen
            for batch in Loader(open_shards(folder, "all"), BATCH[kind], SEED, start=start, epochs=1):
                seen += len(batch.label)
                yield batch.stored, batch.label

        return batches(), lambda: seen

    return Reader(prepare, open_, is_work=kind == "photographs")


# ---- The others


def litdata(kind: str) -> Reader:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    def prepare(folder: Path) -> None:
        writer = BinaryWriter(str(folder), chunk_bytes="64MB")
        for number, (data, label) in enumerate(samples(kind, folder.parent)):
            writer.add_item(number, {"data": data, "label": label})
        writer.done()
        writer.merge()

    class Set(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return (decoded(row["data"]) if kind == "photographs" else row["data"]), row["label"]

    def open_(folder: Path, state: Any) -> tuple[Batches, Callable[[], Any]]:
        data = Set(str(folder), shuffle=True, seed=SEED)
        loader = StreamingDataLoader(data, batch_size=BATCH[kind], num_workers=0, collate_fn=collated)
        if state:
            loader.load_state_dict(state)
        return iter(loader), loader.state_dict

    return Reader(prepare, open_)


def mosaic(kind: str) -> Reader:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    columns = {"data": "ndarray:float16:4,32,32" if kind == "latents" else "bytes", "label": "int"}

    def prepare(folder: Path) -> None:
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for data, label in samples(kind, folder.parent):
                writer.write({"data": data, "label": label})

    class Set(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return (decoded(row["data"]) if kind == "photographs" else row["data"]), row["label"]

    def open_(folder: Path, state: Any) -> tuple[Batches, Callable[[], Any]]:
        clean_stale_shared_memory()
        data = Set(local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=BATCH[kind])
        loader = StreamingDataLoader(data, batch_size=BATCH[kind], num_workers=0, collate_fn=collated)
        if state:
            loader.load_state_dict(state)
        return iter(loader), loader.state_dict

    return Reader(prepare, open_)


def files(kind: str, folder: Path) -> list[tuple[str, int]]:
    """A file a sample, and its class."""
    names = "*.npy" if kind == "latents" else "*.jpg"
    return [(str(path), int(path.parent.name)) for path in sorted(folder.resolve().rglob(names))]


def write_files(kind: str, folder: Path) -> None:
    """Write each latent as a file of NumPy; of photographs, name the folder that is there."""
    if kind == "photographs":
        folder.symlink_to(folder.parent / "photographs")
        return
    for number, (array, label) in enumerate(samples(kind, folder.parent)):
        path = folder / f"{label}" / f"{number:06}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)


def torchvision(kind: str) -> Reader:
    from torch.utils.data import DataLoader
    from torchvision.datasets import DatasetFolder

    def load(path: str) -> Any:
        return decoded(Path(path).read_bytes()) if kind == "photographs" else np.load(path)

    def open_(folder: Path, state: Any) -> tuple[Batches, None]:
        data = DatasetFolder(str(folder), load, extensions=(".jpg", ".npy"))
        generator = torch.Generator().manual_seed(SEED)
        loader = DataLoader(data, BATCH[kind], shuffle=True, generator=generator, collate_fn=collated)
        return iter(loader), None

    return Reader(lambda folder: write_files(kind, folder), open_)


def spdl(kind: str) -> Reader:
    import random

    from spdl import io as media
    from spdl.pipeline import PipelineBuilder

    def load(item: tuple[str, int]) -> tuple[Any, int]:
        return media.load_npy(Path(item[0]).read_bytes()), item[1]

    def batch_of(items: list[tuple[str, int]]) -> Any:
        # Its own decoder and scaler (FFmpeg), as its documentation recommends for images.
        filters = media.get_video_filter_desc(
            filter_desc=f"scale={SIDE}:{SIDE}:force_original_aspect_ratio=increase,crop={SIDE}:{SIDE}",
            pix_fmt="rgb24",
        )
        frames = [media.decode_packets(media.demux_image(path), filter_desc=filters) for path, _ in items]
        return media.to_torch(media.convert_frames(frames)), torch.tensor([label for _, label in items])

    def open_(folder: Path, state: Any) -> tuple[Batches, None]:
        rows = files(kind, folder)
        random.Random(SEED).shuffle(rows)
        builder = PipelineBuilder().add_source(rows)
        if kind == "latents":
            builder = builder.pipe(load).aggregate(BATCH[kind]).pipe(collated)
        else:
            builder = builder.aggregate(BATCH[kind]).pipe(batch_of)
        pipeline = builder.add_sink(2).build(num_threads=1)

        def batches() -> Batches:
            with pipeline.auto_stop():
                yield from pipeline

        return batches(), None

    return Reader(lambda folder: write_files(kind, folder), open_)


def grain(kind: str) -> Reader:
    import grain as library
    from array_record.python.array_record_module import ArrayRecordWriter

    def prepare(folder: Path) -> None:
        folder.mkdir()
        writer = ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1")
        for data, label in samples(kind, folder.parent):
            content = data.tobytes() if kind == "latents" else data
            writer.write(label.to_bytes(4, "little") + content)
        writer.close()

    def parsed(record: bytes) -> tuple[Any, int]:
        label, content = int.from_bytes(record[:4], "little"), record[4:]
        if kind == "photographs":
            return decoded(content).numpy(), label
        return np.frombuffer(content, np.float16).reshape(SHAPE), label

    def open_(folder: Path, state: Any) -> tuple[Batches, Callable[[], Any]]:
        source = library.sources.ArrayRecordDataSource([str(folder / "data.array_record")])
        data = library.MapDataset.source(source).seed(SEED).shuffle().map(parsed).batch(BATCH[kind])
        options = library.ReadOptions(num_threads=1, prefetch_buffer_size=2 * BATCH[kind])
        batches = iter(data.to_iter_dataset(options))
        if state:
            batches.set_state(state)
        return batches, batches.get_state

    return Reader(prepare, open_)


def webdataset(kind: str) -> Reader:
    import webdataset as library

    name = "npy" if kind == "latents" else "jpg"

    def prepare(folder: Path) -> None:
        folder.mkdir()
        pattern = str(folder / "%05d.tar")
        with library.ShardWriter(pattern, maxcount=2000, encoder=kind == "latents", verbose=0) as writer:
            for number, (data, label) in enumerate(samples(kind, folder.parent)):
                content = label if kind == "latents" else str(label).encode()
                writer.write({"__key__": f"{number:06}", name: data, "cls": content})

    def open_(folder: Path, state: Any) -> tuple[Batches, None]:
        urls = [str(path) for path in sorted(folder.glob("*.tar"))]
        stream = library.WebDataset(urls, shardshuffle=len(urls), detshuffle=True, seed=SEED).shuffle(1000)
        if kind == "latents":
            stream = stream.decode().to_tuple(name, "cls")
        else:
            stream = stream.to_tuple(name, "cls").map_tuple(decoded, int)
        return iter(stream.batched(BATCH[kind], collation_fn=collated)), None

    return Reader(prepare, open_)


READERS = {each.__name__: each for each in (ours, litdata, mosaic, spdl, grain, webdataset, torchvision)}


# ---- Measuring


def in_fork(work: Callable[[], None]) -> None:
    """Do something in a copy of this process, whose memory is not this one's."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def measure(kind: str, name: str, work: Path) -> dict[str, float | None]:
    """What is printed."""
    torch.set_num_threads(1)
    if kind == "photographs":
        photographs(work)
    reader, folder, count = READERS[name](kind), work / f"{kind}-{name}", COUNT[kind]
    if reader.is_work:
        shutil.rmtree(folder, ignore_errors=True)
    started = cpu_seconds()
    if not folder.exists():
        in_fork(lambda: reader.prepare(folder))
    work_s = cpu_seconds() - started if reader.is_work else 0.0
    before_mib = peak_mib()
    started = time.perf_counter()
    next(reader.open(folder, None)[0])
    first_s = time.perf_counter() - started
    started = cpu_seconds()
    batches, state = reader.open(folder, None)
    seen, middle = 0, None
    for number, (_, labels) in enumerate(batches):
        seen += len(labels)
        if state is not None and number == count // BATCH[kind] // 2:
            middle = state()
    epoch_s = cpu_seconds() - started
    assert seen == count, (seen, count)
    resumed_s: float | None = None
    if middle is not None:
        started = time.perf_counter()
        next(reader.open(folder, middle)[0])
        resumed_s = time.perf_counter() - started
    return {
        "ten_epochs": 10 * count / (work_s + 10 * epoch_s),
        "first_epoch": count / (work_s + epoch_s),
        "epoch": count / epoch_s,
        "first_batch_s": first_s,
        "resumed_s": resumed_s,
        "memory_mib": peak_mib() - before_mib,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print(json.dumps(measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
