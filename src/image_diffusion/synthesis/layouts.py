"""Write synthetic images with their classes and seeds in common layouts. Equal images give equal bytes."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.files.atomic import digest
from image_diffusion.metrics.samples import Samples

_IN_A_FILE = 5000
"""Images in one tar or Parquet file."""
_LONGEST_NAME = 255
"""Maximum number of bytes in the name of a folder."""
_NOT_IN_FOLDERS = re.compile(r'^\.+|[/\\:*?"<>|%\x00-\x1f\x7f-\x9f\u2028\u2029]')
UNLABELLED = "unlabelled"
"""Name of the folder of images without classes."""


@dataclass(frozen=True)
class SyntheticSet:
    """Images of a set. seeds: of each, int64 [N]. numbers: requested for each image, by column; None for a missing
    number."""

    samples: Samples
    seeds: NDArray[np.int64]
    numbers: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes; none without classes."""
        return self.samples.classes if self.samples.has_labels else []

    def __iter__(self) -> Iterator[SyntheticImage]:
        for row, seed in enumerate(self.seeds.tolist()):
            label = int(self.samples.labels[row])
            name = self.samples.classes[label] if self.samples.has_labels else UNLABELLED
            pixels = self.samples.gather(np.array([row]))[0].permute(1, 2, 0).numpy()
            file = io.BytesIO()
            Image.fromarray(pixels.squeeze()).save(file, format="PNG")
            numbers = {column: values[row] for column, values in self.numbers.items()}
            yield SyntheticImage(f"{seed:08}", seed, file.getvalue(), label, name, numbers)


@dataclass(frozen=True)
class SyntheticImage:
    """A synthetic image. key: its seed as eight digits, and the name of its file. png: its bytes. label: the position
    of its class; 0 without classes. numbers: by column."""

    key: str
    seed: int
    png: bytes
    label: int
    class_name: str
    numbers: Mapping[str, float | None]


def write_folders(folder: Path, images: SyntheticSet) -> None:
    """Write `images/CLASS/SEED.png`, which torchvision's ImageFolder reads, and `images/metadata.csv` with label, seed
    and numbers, which Hugging Face's imagefolder reads. A class without images has no folder: ImageFolder rejects empty
    folders."""
    root = folder / "images"
    root.mkdir()
    with (root / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["file_name", "label", "seed", *images.numbers])
        for image in images:
            name = f"{folder_name(image.class_name)}/{image.key}.png"
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(image.png)
            writer.writerow([name, image.class_name, image.seed, *image.numbers.values()])


def folder_name(class_name: str) -> str:
    """Return the folder of a class: its name. Characters that a folder's name may not have are percent-encoded; a name
    that is too long is cut and ends in a digest."""
    name = _NOT_IN_FOLDERS.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), class_name)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    end = f"-{digest(class_name)[:16]}"
    return name.encode()[: _LONGEST_NAME - len(end)].decode(errors="ignore") + end


def _files_of(images: SyntheticSet) -> Iterator[tuple[int, list[SyntheticImage]]]:
    """Yield the number of each file and the images in it."""
    rest = iter(images)
    return enumerate(iter(lambda: list(islice(rest, _IN_A_FILE)), []))


def write_webdataset(folder: Path, images: SyntheticSet) -> None:
    """Write `shard-00000.tar`, …, with three files per image: SEED.png; SEED.cls, the number of its class; and
    SEED.json with class, label, seed and numbers, which `pairs.columns` can read."""
    for number, part in _files_of(images):
        with tarfile.open(folder / f"shard-{number:05}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for image in part:
                described = {"class": image.class_name, "label": image.label, "seed": image.seed}
                about = json.dumps(described | dict(image.numbers))
                members = {"png": image.png, "cls": str(image.label).encode(), "json": about.encode()}
                for suffix, data in members.items():
                    member = tarfile.TarInfo(f"{image.key}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path, images: SyntheticSet) -> None:
    """Write `data/train-00000.parquet`, …: columns image (bytes and path), label, seed and numbers, with types in the
    schema's metadata for Hugging Face's datasets."""
    import pyarrow as pa  # here: loading it would slow the start of every stage
    from pyarrow import parquet

    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": images.classes or [UNLABELLED]},
        "seed": {"_type": "Value", "dtype": "int64"},
    } | {column: {"_type": "Value", "dtype": "float64"} for column in images.numbers}
    columns = {
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "label": pa.int64(),
        "seed": pa.int64(),
    } | {column: pa.float64() for column in images.numbers}
    schema = pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    (folder / "data").mkdir()
    for number, part in _files_of(images):
        rows = [
            {"image": {"bytes": image.png, "path": f"{image.key}.png"}, "label": image.label, "seed": image.seed}
            | dict(image.numbers)
            for image in part
        ]
        parquet.write_table(pa.Table.from_pylist(rows, schema), folder / "data" / f"train-{number:05}.parquet")


WRITERS = {"folders": write_folders, "webdataset": write_webdataset, "parquet": write_parquet}
"""Writers of the layouts, by `synthesize.format`."""
