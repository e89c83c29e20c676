"""What a detector has seen in the real images of a data set, in files: looked at once, for all that is compared.

A folder for each detector: of both splits and of degraded images (`self_test`) the features (float32 [N, D] .npy, and
as such the class scores and spatial features of detectors that have them), the statistics as ADM and EDM lay them out,
and reference.json, which says of which images and by which detector, with the sha256 of each file. Features are read
where they lie: a data set of any size takes no more memory than the rows that a metric asks for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.files import read_json, write_json
from image_diffusion.core.progress import Progress
from image_diffusion.core.together import gathered, share
from image_diffusion.core.verify import check_files, describe
from image_diffusion.metrics.features import AT_ONCE, Detected, Detector, ImageSet, at_once
from image_diffusion.metrics.moments import Gaussian, check_finite
from image_diffusion.metrics.panel import gaussians_of
from image_diffusion.metrics.references import read_statistics, write_statistics

FORMAT = 2
"""Of reference.json."""
_AGAIN = "Run reference again."
_PARTS = tuple(field.name for field in fields(Detected))


@dataclass(frozen=True)
class Seen:
    """Of one split: what was seen in each image, in the split's order, and the Gaussians of that."""

    detected: Detected
    gaussians: Mapping[str, Gaussian]


def write_seen(detector: Detector, splits: Mapping[str, ImageSet], folder: Path, writes: bool = True) -> None:
    """Look at every image of the splits, by name, and write the folder; splits of fewer than two images are left out.

    Where a launcher started several processes they share the images, and the one that `writes` finishes the folder.
    Raises ValueError for features that are not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if writes:
        for left_over in folder.glob("*.np[yz]"):
            left_over.unlink()
    gathered(True)  # of which nothing is left
    known = {name: images for name, images in splits.items() if images.num_samples > 1}
    for name, images in known.items():
        _look(detector, images, folder, name)
    gathered(True)  # all rows are written
    if not writes:
        return
    for name in known:
        write_statistics(folder / f"{name}.npz", gaussians_of(_read(folder, name)), str(detector.identity["sha256"]))
    paths = [path for name in known for path in (*_parts_in(folder, name).values(), folder / f"{name}.npz")]
    described = {name: {"data": images.digest, "num_images": images.num_samples} for name, images in known.items()}
    about = {"format": FORMAT, "detector": detector.identity, "splits": described}
    write_json(folder / "reference.json", about | {"files": describe(folder, paths)})


def read_seen(
    folders: Sequence[Path], detectors: Sequence[Detector], splits: Mapping[str, ImageSet]
) -> list[dict[str, Seen] | None]:
    """What `write_seen` wrote, by split, for each detector; None for one of which there is no folder.

    Raises ValueError for a folder that is damaged, or of other images or detectors.
    """
    found: list[dict[str, Seen] | None] = [None] * len(detectors)
    for folder in folders:
        about = read_json(folder / "reference.json")
        number = next((i for i, each in enumerate(detectors) if about.get("detector") == each.identity), None)
        if number is None:
            names = ", ".join(str(each.identity["name"]) for each in detectors)
            raise ValueError(f"{folder} is of another detector than those in use ({names}). {_AGAIN}")
        found[number] = _read_checked(folder, about, detectors[number], splits)
    return found


def _read_checked(
    folder: Path, about: Mapping[str, Any], detector: Detector, splits: Mapping[str, ImageSet]
) -> dict[str, Seen]:
    if about.get("format") != FORMAT:
        told = f"{folder / 'reference.json'} has format {about.get('format')}"
        raise ValueError(f"{told}; this version reads format {FORMAT}. {_AGAIN}")
    for name, images in splits.items():
        seen = about["splits"].get(name, {"data": None})["data"]
        if images.num_samples > 1 and seen != images.digest:
            raise ValueError(f"{folder} is of other images than those of the {name} split. {_AGAIN}")
    check_files(folder, about["files"], _AGAIN)
    sha256 = str(detector.identity["sha256"])
    return {
        name: Seen(_read(folder, name), read_statistics(folder / f"{name}.npz", sha256)) for name in about["splits"]
    }


@torch.inference_mode()
def _look(detector: Detector, images: ImageSet, folder: Path, split: str) -> None:
    mine = share(np.arange(images.num_samples), AT_ONCE)
    with Progress(f"features of the {split} split", len(mine), "image") as progress:
        for count, chosen in at_once(mine):
            seen = detector(images.gather(chosen)).first(count)
            check_finite(seen.features)
            for part in _PARTS:
                if (rows := getattr(seen, part)) is not None:
                    _write_rows(folder / f"{split}-{part}.npy", rows, int(chosen[0]), images.num_samples)
            progress.advance(count)


def _write_rows(path: Path, rows: Tensor, first: int, total: int) -> None:
    """Write rows [B, D] of a float32 array [total, D] that several processes fill. (A mapped file would end the process
    on a full disk; this raises OSError.)"""
    head = io.BytesIO()
    shape = (total, *rows.shape[1:])
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    path.touch()
    with path.open("r+b") as file:
        if file.read(len(head.getvalue())) != head.getvalue():  # a new file, or one of another set
            file.seek(0)
            file.write(head.getvalue())
        data = rows.to("cpu", torch.float32).contiguous().numpy()
        file.seek(len(head.getvalue()) + first * data[0].nbytes)
        file.write(data.tobytes())
        file.truncate(len(head.getvalue()) + total * data[0].nbytes)


def _parts_in(folder: Path, split: str) -> dict[str, Path]:
    paths = {part: folder / f"{split}-{part}.npy" for part in _PARTS}
    return {part: path for part, path in paths.items() if path.is_file()}


def _read(folder: Path, split: str) -> Detected:
    parts = {part: np.load(path, mmap_mode="c") for part, path in _parts_in(folder, split).items()}
    return Detected(**{part: torch.from_numpy(array) for part, array in parts.items()})
